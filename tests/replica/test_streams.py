"""A thread's own generator."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from quorate.coordination.keys import key
from quorate.replica.streams import RANDOM_OPERATORS, Stream

LSTM = nn.LSTM(4, 4, num_layers=2, dropout=0.5)
ONES = torch.ones(2, 3, 4, 4)

DRAWS: dict[str, Callable[[], torch.Tensor]] = {
    "rand": lambda: torch.rand(3),
    "randn": lambda: torch.randn(40),
    "randint": lambda: torch.randint(0, 9, (5,)),
    "randperm": lambda: torch.randperm(9),
    "normal": lambda: torch.normal(torch.ones(3), 1.0),
    "multinomial": lambda: torch.multinomial(torch.ones(9), 3),
    "bernoulli": lambda: torch.bernoulli(torch.full((9,), 0.5)),
    "poisson": lambda: torch.poisson(torch.ones(8)),
    "dropout": lambda: F.dropout(ONES),
    "dropout2d": lambda: F.dropout2d(ONES),
    "alpha dropout": lambda: F.alpha_dropout(ONES, training=True),
    "rrelu": lambda: F.rrelu(-ONES, training=True),
    "gumbel": lambda: F.gumbel_softmax(torch.ones(4)),
    "attention": lambda: F.scaled_dot_product_attention(ONES, ONES, ONES, dropout_p=0.5),
    "lstm": lambda: LSTM(torch.ones(3, 5, 4))[0],
    "beta": lambda: torch.distributions.Beta(1.0, 2.0).sample(),
    "dirichlet": lambda: torch.distributions.Dirichlet(torch.ones(3)).sample(),
    "cauchy": lambda: torch.empty(4).cauchy_(),
    "initialisation": lambda: nn.Linear(3, 3).weight,
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_stream_is_repeatable_and_leaves_the_process_alone(name: str) -> None:
    draw = DRAWS[name]
    before = torch.get_rng_state()
    with Stream() as stream:
        stream.reseed(7)
        first = draw()
        assert stream.drawn
        stream.reseed(7)
        again = draw()
        stream.reseed(8)
        other = draw()
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(before, torch.get_rng_state())


def test_the_list_of_random_operators_is_that_of_this_torch() -> None:
    found = {}
    for name in torch._C._dispatch_get_all_op_names():
        base, _, overload = name.partition(".")
        if base.startswith("aten::"):
            schema = torch._C._get_schema(base, overload)
            names = [argument.name for argument in schema.arguments]
            on_cpu = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU")
            if "generator" in names and on_cpu:
                found[name.removeprefix("aten::")] = names.index("generator")
    assert found == RANDOM_OPERATORS


def test_threads_do_not_disturb_each_other() -> None:
    def draw(seed: int, into: list[torch.Tensor]) -> None:
        with Stream() as stream:
            stream.reseed(seed)
            into.append(torch.cat([torch.rand(100) for _ in range(200)]))

    alone: list[torch.Tensor] = []
    for seed in range(4):
        draw(seed, alone)
    together: list[list[torch.Tensor]] = [[] for _ in range(4)]
    threads = [threading.Thread(target=draw, args=(s, together[s])) for s in range(4)]
    for thread in threads:
        thread.start()
    torch.rand(1000)
    for thread in threads:
        thread.join()
    assert all(torch.equal(alone[s], together[s][0]) for s in range(4))


def test_manual_seed_and_states_mean_the_stream_inside_it() -> None:
    torch.manual_seed(1)
    outside = torch.get_rng_state()
    with Stream() as stream:
        stream.reseed(5)
        torch.manual_seed(3)
        inside = torch.rand(4)
        assert not torch.equal(torch.get_rng_state(), outside)
        with torch.random.fork_rng():
            torch.rand(9)
        after = torch.rand(1)
    assert torch.equal(torch.get_rng_state(), outside)
    torch.manual_seed(3)
    assert torch.equal(inside, torch.rand(4))
    assert torch.equal(after, torch.rand(1))


def test_a_named_generator_stays_what_it_is() -> None:
    expected = torch.rand(5, generator=torch.Generator().manual_seed(2))
    with Stream():
        assert torch.equal(expected, torch.rand(5, generator=torch.Generator().manual_seed(2)))


def test_streams_nest() -> None:
    with Stream() as outer:
        outer.reseed(1)
        first = torch.rand(1)
        with Stream() as inner:
            inner.reseed(1)
            assert torch.equal(first, torch.rand(1))
        second = torch.rand(1)
        outer.reseed(1)
        assert torch.equal(torch.cat([first, second]), torch.cat([torch.rand(1), torch.rand(1)]))


class Passing(TorchDispatchMode):
    """A mode that does nothing: below it operators have the thread's dispatch key off."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


LIKE: dict[str, Callable[[], torch.Tensor]] = {
    "rand like": lambda: torch.rand_like(ONES),
    "randn like": lambda: torch.randn_like(ONES),
    "randint like": lambda: torch.randint_like(ONES, 9),
    "randint like, from": lambda: torch.randint_like(ONES, 3, 9),
    "randint from": lambda: torch.randint(3, 9, (5,)),
    "normal of numbers": lambda: torch.normal(0.0, 1.0, (5,)),
    "rand into": lambda: torch.rand(5, out=torch.empty(5)),
    "randn into": lambda: torch.randn(5, out=torch.empty(5)),
    "randint into": lambda: torch.randint(9, (5,), out=torch.empty(5, dtype=torch.int64)),
    "randint from into": lambda: torch.randint(3, 9, (5,), out=torch.empty(5, dtype=torch.int64)),
    "randperm into": lambda: torch.randperm(9, out=torch.empty(9, dtype=torch.int64)),
    "normal into": lambda: torch.normal(0.0, 1.0, (5,), out=torch.empty(5)),
    "bernoulli of a number": lambda: torch.bernoulli(ONES, 0.5),
    "normal distribution": lambda: torch.distributions.Normal(0.0, 1.0).sample((3,)),
}


@pytest.mark.parametrize("name", [*DRAWS, *LIKE])
def test_a_users_dispatch_mode_changes_no_draw(name: str) -> None:
    draw = (DRAWS | LIKE)[name]
    before = torch.get_rng_state()
    with Stream() as stream:
        stream.reseed(7)
        expected = draw()
        stream.reseed(7)
        with Passing():
            assert torch.equal(draw(), expected)
        assert stream.drawn
    assert torch.equal(before, torch.get_rng_state())


def test_the_default_generator_by_its_name_is_the_threads() -> None:
    before = torch.default_generator.get_state()
    with Stream() as stream:
        stream.reseed(7)
        expected = torch.rand(3), torch.ones(3).bernoulli_(0.5)
        stream.reseed(7)
        named = torch.default_generator
        assert torch.equal(torch.rand(3, generator=named), expected[0])
        assert torch.equal(torch.ones(3).bernoulli_(0.5, generator=named), expected[1])
    assert torch.equal(torch.default_generator.get_state(), before)


def test_a_key_is_made_of_its_parts_when_it_is_wanted() -> None:
    with Stream() as stream:
        stream.reseed(("update", 0, 7))
        assert not stream.drawn
        by_parts = torch.rand(3)
        assert stream.drawn
        stream.reseed(key("update", 0, 7))
        assert torch.rand(3).equal(by_parts)
        stream.reseed(("update", 0, 8))
        assert not torch.rand(3).equal(by_parts)
