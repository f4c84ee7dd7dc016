"""``Compute(random="host")``: a device gets the CPU's numbers, and draws none."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.func import vmap
from torch.utils._python_dispatch import TorchDispatchMode

from quorate.errors import UserError
from quorate.replica.streams import Stream

DEVICE = "sim:1"


def full(value: float, *size: int) -> torch.Tensor:
    return torch.full(size or (5, 8), float(value))


DRAWS: dict[str, Callable[[], torch.Tensor]] = {
    "new": lambda: torch.rand(40) + torch.randn(40) + torch.randint(3, 9, (40,)),
    "permutation": lambda: torch.randperm(9),
    "like": lambda: torch.rand_like(full(1)) + torch.randint_like(full(1), 9),
    "into": lambda: torch.rand(5, out=torch.empty(0)) + torch.bernoulli(full(0.4, 5)),
    "in place": lambda: full(0).exponential_() + full(0).cauchy_() + full(0).random_(3, 7),
    "of values": lambda: torch.normal(full(3), full(2)) + torch.poisson(full(8)),
    "by values": lambda: full(0).bernoulli_(full(0.3)),
    "choice": lambda: torch.multinomial(full(1, 9), 3),
    "with gaps": lambda: full(0, 40, 50)[:, :33].normal_(),
    "turned": lambda: F.dropout(full(1, 30, 40).t()),
    "dropout": lambda: F.dropout(full(1)) + F.dropout(full(1), inplace=True),
    "other dropout": lambda: F.alpha_dropout(full(1), training=True),
    "rrelu": lambda: F.rrelu(full(-1), training=True) + F.rrelu(full(-2), training=True),
    "attention": lambda: F.scaled_dot_product_attention(*[full(1, 2, 4, 4)] * 3, dropout_p=0.5),
    "distribution": lambda: torch.distributions.Beta(full(1), full(2)).sample(),
    "vmap": lambda: vmap(F.dropout, randomness="different")(full(1)),
}


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", DRAWS)
def test_draws_on_the_host_are_the_cpus(name: str) -> None:
    with Stream() as stream, stream.of_devices(frozenset({"sim"})):
        stream.reseed(7)
        expected = DRAWS[name]()
        torch.sim.manual_seed_all(99)
        state = torch.sim.get_rng_state(1)
        for _ in range(2):
            stream.reseed(7)
            with torch.device(DEVICE):
                assert torch.equal(DRAWS[name]().cpu(), expected)
        stream.reseed(7)
        with Passing(), torch.device(DEVICE):
            found = DRAWS[name]()
        assert found.device == torch.device(DEVICE)
        assert torch.equal(found.cpu(), expected)
        assert found.stride() == expected.stride()
        assert torch.equal(torch.sim.get_rng_state(1), state)


def test_a_generator_that_is_named_draws_on_its_device() -> None:
    own = torch.Generator(DEVICE).manual_seed(3)
    expected = torch.rand(5, device=DEVICE, generator=own).cpu()
    with Stream() as stream, stream.of_devices(frozenset({"sim"})):
        own.manual_seed(3)
        assert torch.equal(torch.rand(5, device=DEVICE, generator=own).cpu(), expected)


def test_a_kernel_that_draws_by_itself_is_refused() -> None:
    query, words = full(1, 2, 3, 4, 4).to(DEVICE), r"_flash_attention .draws\.py.*sdpa_kernel"
    attention = torch.ops.aten._scaled_dot_product_flash_attention
    with Stream() as s, s.of_devices(frozenset({"sim"})), pytest.raises(UserError, match=words):
        attention(query, query, query, 0.1)
