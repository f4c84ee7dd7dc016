"""Servers in this process: the bits of a coordinator that has it all, whatever their number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support.messages import expect_error
from torch.optim import Optimizer

from quorate.coordination.ownership import BLOCK
from quorate.errors import SettingError
from quorate.replica.shard_sum import ShardSum
from quorate.training.optimizing.optimize import Optimize
from quorate.training.serving.served import ServedOptimizer
from quorate.training.serving.serving import Serving
from quorate.training.serving.slice import Slice
from quorate.training.state import State
from quorate.transports.held import Held
from quorate.transports.servers import NO_IMAGE, Answer, Image, Slicing, Told

V = 5
Make = Callable[[list[torch.nn.Parameter]], Optimizer]


class InMemory:
    """Servers of this process."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.where: Sequence[str] = ["here"] * count
        self.have_newest = False
        self.slices = [Slice() for _ in range(count)]
        self._images: list[Image] = []

    def keep(self, ticket: int, step: int, shard: int, leaves: int) -> None:
        for own in self.slices:
            own.keep(ticket, step, shard, leaves)

    def ask(self, told: Sequence[Told], images: Sequence[Image] = ()) -> list[Answer]:
        given = images or [NO_IMAGE] * self.count
        return [s.do(t, i) for s, t, i in zip(self.slices, told, given, strict=True)]

    def renew(self, told: Sequence[Told], images: Sequence[Image] = ()) -> list[Told]:
        answers = self.ask(told, images)
        self._images = [image.copy() for _, image in answers]
        self.have_newest = True
        return [answer for answer, _ in answers]

    def values(self) -> list[Image]:
        return self._images

    def watch(self, ring: Callable[[], None]) -> None:
        """Nothing of this is ever lost."""


class Model(torch.nn.Module):
    """Some blocks and a bit, of two dtypes; one layer has no gradient in odd steps."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.wide = torch.nn.Parameter(torch.randn(300, 333, generator=generator))
        self.odd = torch.nn.Parameter(torch.randn(7, generator=generator))
        self.image = torch.nn.Parameter(
            torch.randn(40, 60, 5, 5, generator=generator).to(memory_format=torch.channels_last)
        )
        self.alone = torch.nn.Parameter(torch.tensor(0.5))
        self.fine = torch.nn.Parameter(
            torch.randn(2, BLOCK, generator=generator, dtype=torch.float64)
        )


def state_of(make: Make, *, served: bool, **optimize: Any) -> State:
    return State(
        Model(),
        torch.device("cpu"),
        shared=True,
        served=served,
        optimize=Optimize(make, **optimize),
    )


def shard(state: State, step: int, number: int) -> ShardSum:
    gradient = state.parameters.layout.new(torch.device("cpu"))
    generator = torch.Generator().manual_seed(100 * step + number)
    for view in gradient.views.values():
        view.copy_(torch.randn(view.shape, generator=generator, dtype=view.dtype))
    missing = frozenset({"odd"} if step % 2 else ())
    for name in missing:
        gradient.views[name].zero_()
    return ShardSum(1.0 + number, {"loss": 1.0}, gradient, missing=missing).computed_by(0, number)


def train(state: State, steps: range, servers: InMemory | None = None) -> list[float | None]:
    """Make updates of made-up gradients; return their norms."""
    norms = []
    for step in steps:
        shards = [shard(state, step, number) for number in range(V)]
        if servers is not None:
            slicing = Slicing(state.parameters.layout, servers.count)
            for number, each in enumerate(shards):
                assert each.gradient is not None
                for server, own in enumerate(servers.slices):
                    own.take(number, step, slicing.cut(each.gradient, server))
                each.gradient = Held(step, number)
            for number in (3, 0, 1, 4, 2):
                servers.keep(number, step, number, V)
        parts = [((0, number), each) for number, each in enumerate(shards)]
        applied = state.update.apply(parts, V, step + 1, V)
        assert applied.not_finite is None
        norms.append(applied.grad_norm)
    return norms


def moments(state: State) -> dict[str, torch.Tensor]:
    with state.optimizer.whole():
        tensors, _ = state.optimizer_state.save()
        return {name: tensor.clone() for name, tensor in tensors.items()}


def require_same(one: State, other: State) -> None:
    for a, b in zip(one.parameters.vectors, other.parameters.vectors, strict=True):
        assert a.equal(b)
    if one.average is not None and other.average is not None:
        for a, b in zip(one.average.shadow.vectors, other.average.shadow.vectors, strict=True):
            assert a.equal(b)
    first, second = moments(one), moments(other)
    assert first.keys() == second.keys()
    assert all(first[name].equal(second[name]) for name in first)


def adam(params: list[torch.nn.Parameter]) -> Optimizer:
    groups = [{"params": params[:2], "lr": 0.01}, {"params": params[2:]}]
    return torch.optim.Adam(groups, lr=0.02, weight_decay=0.1)


def momentum(params: list[torch.nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True)


def serve(state: State, servers: InMemory) -> Serving:
    assert state.serving is not None
    assert isinstance(state.optimizer, ServedOptimizer)
    state.optimizer.begin(servers)
    return state.serving


@pytest.mark.parametrize(
    ("make", "count"),
    [
        *((adam, 1), (adam, 2), (adam, 9)),
        *((momentum, 2), (torch.optim.ASGD, 9), (torch.optim.Adagrad, 2)),
    ],
)
def test_the_same_bits_for_any_number_of_servers(make: Make, count: int) -> None:
    def schedule(optimizer: Optimizer) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    settings: dict[str, Any] = {"clip_norm": 0.5, "ema_decay": 0.9, "schedule": schedule}
    alone = state_of(make, served=False, **settings)
    # 1. Two updates before there are servers, three with them.
    served, servers = state_of(make, served=True, **settings), InMemory(count)
    norms = train(alone, range(5))
    assert train(served, range(2)) == norms[:2]
    serving = serve(served, servers)
    assert train(served, range(2, 5), servers) == norms[2:]
    serving.bring_home()
    require_same(alone, served)
    # 2. What user code finds and changes goes to the servers, and all comes back at the end.
    for state in (alone, served):
        state.parameters.views["wide"].mul_(0.5)
        for entries in [*state.optimizer.inner.state.values()]:
            for value in entries.values():
                if value.dim():
                    value.mul_(0.25)
    assert served.optimizer.is_lent
    served.optimizer.begin(servers)
    train(alone, range(5, 7))
    train(served, range(5, 7), servers)
    serving.bring_home()
    served.optimizer.end()
    serving.end()
    train(alone, range(7, 8))
    train(served, range(7, 8))
    require_same(alone, served)


def test_what_is_not_finite_is_not_made_and_named() -> None:
    state, servers = state_of(adam, served=True), InMemory(3)
    serving = serve(state, servers)
    before = [vector.clone() for vector in state.parameters.vectors]
    bad = shard(state, 0, 0)
    assert bad.gradient is not None
    bad.gradient.views["fine"][1, 5] = float("nan")
    slicing = Slicing(state.parameters.layout, 3)
    for server, own in enumerate(servers.slices):
        own.take(7, 0, slicing.cut(bad.gradient, server))
    bad.gradient = Held(0, 7)
    servers.keep(7, 0, 0, 1)
    applied = state.update.apply([((0, 0), bad)], 1, 1, 1)
    assert applied.not_finite == ["fine"]
    serving.bring_home()
    assert all(a.equal(b) for a, b in zip(before, state.parameters.vectors, strict=True))
    # What comes after its step is over nobody keeps.
    servers.slices[0].take(8, 0, NO_IMAGE)
    assert servers.slices[0]._shards == {}


def test_optimizers_that_see_whole_tensors_are_refused() -> None:
    with expect_error(SettingError, name="servers", got="Adafactor"):
        state_of(torch.optim.Adafactor, served=True)


def test_a_forward_pass_that_writes_parameters_is_refused() -> None:
    with expect_error(SettingError, name="servers", got="some"):
        State(
            Model(),
            torch.device("cpu"),
            shared=True,
            served=True,
            written=frozenset({"wide"}),
            optimize=Optimize(adam),
        )
