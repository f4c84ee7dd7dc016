"""A thread's own generator."""

import random
import re
import sys
from collections.abc import Callable
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from quorate.coordination.keys import key
from quorate.engines.seeded_draws import seeded_draws
from quorate.replica.host_draws import FUSED
from quorate.replica.streams import RANDOM_OPERATORS, Stream
from quorate.replica.turns import Turns, drawn_outside

LSTM = nn.LSTM(4, 4, num_layers=2, dropout=0.5)
ONES = torch.ones(2, 3, 4, 4)

DRAWS: dict[str, Callable[[], torch.Tensor]] = {
    "rand": lambda: torch.rand(3),
    "rand like": lambda: torch.rand_like(ONES),
    "randint from": lambda: torch.randint(3, 9, (5,)),
    "randperm into": lambda: torch.randperm(9, out=torch.empty(9, dtype=torch.int64)),
    "randperm": lambda: torch.randperm(9),
    "normal": lambda: torch.normal(torch.ones(3), 1.0),
    "multinomial": lambda: torch.multinomial(torch.ones(9), 3),
    "dropout": lambda: F.dropout(ONES),
    "attention": lambda: F.scaled_dot_product_attention(ONES, ONES, ONES, dropout_p=0.5),
    "lstm": lambda: LSTM(torch.ones(3, 5, 4))[0],
    "beta": lambda: torch.distributions.Beta(1.0, 2.0).sample(),
}


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


def test_the_list_of_kernels_that_draw_is_that_of_this_torch() -> None:
    """Kernels of devices with a dropout: forward kernels, as other kernels reuse their numbers."""
    found = set()
    for name in torch._C._dispatch_get_all_op_names():
        base, _, overload = name.partition(".")
        if base.startswith("aten::") and overload != "out":
            operator = getattr(getattr(torch.ops.aten, base[6:]), overload or "default")
            names = {argument.name for argument in operator._schema.arguments}
            composite = any(
                torch._C._dispatch_has_kernel_for_dispatch_key(name, f"Composite{kind}Autograd")
                for kind in ("Implicit", "Explicit")
            )
            tagged = torch.Tag.nondeterministic_seeded in operator.tags
            if tagged and not composite and names & {"dropout_p", "dropout"}:
                found.add(name[6:])
    others = re.compile("backward|no_dropout|_fill_|_for_cpu|_sdp_choice")
    found = {name for name in found if not others.search(name)}
    # The first has another name for its dropout, the second is composite without a device's kernel.
    more = {"_fused_dropout", "_scaled_dot_product_fused_attention_overrideable"}
    assert found | more == FUSED.keys()


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
    """A mode without an effect: below the mode operators have the thread's dispatch key off."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", DRAWS)
def test_a_stream_is_repeatable_and_leaves_the_process_alone(name: str) -> None:
    """A dispatch mode of the user's changes no draw."""
    draw = DRAWS[name]
    before = torch.get_rng_state()
    with Stream() as stream:
        stream.reseed(7)
        expected = draw()
        assert stream.drawn
        stream.reseed(7)
        with Passing():
            assert torch.equal(draw(), expected)
        stream.reseed(8)
        assert not torch.equal(draw(), expected)
    assert torch.equal(before, torch.get_rng_state())


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


def test_draws_outside_shards_follow_from_what_draws_and_from_the_update() -> None:
    plan: Any = SimpleNamespace(seed=3)

    def drawn(what: str, n: int) -> float:
        with seeded_draws(what, plan, n):
            return torch.rand(()).item()

    keys = [("update", 1), ("update", 2), ("between", 1)]
    assert len({drawn(*each) for each in [*keys, *keys]}) == 3


def test_no_shard_runs_while_the_turn_is_held() -> None:
    turns, ran = Turns(side_by_side=True), list[object]()
    turns.require("it writes to what towers share")
    thread = Thread(target=turns.run, args=(ran.append,))
    with turns.held():
        thread.start()
        thread.join(0.1)
        assert not ran
    thread.join()
    assert ran


def test_draws_in_turns_are_not_seen_from_other_threads() -> None:
    turns = Turns()

    def draw_in_turns() -> None:
        for _ in range(1500):
            turns.run(lambda reseed: (reseed(5), random.random()))

    thread, before = Thread(target=draw_in_turns), drawn_outside()
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        while thread.is_alive():
            assert drawn_outside() == before
    finally:
        thread.join()
        sys.setswitchinterval(interval_s)
