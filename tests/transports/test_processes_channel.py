"""A channel takes in shards that were added before they came: all of a group count, or none."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from quorate.coordination.plan import Plan
from quorate.coordination.protocol import Compute, Discard, Done, Joined, Keep
from quorate.coordination.tree import tree_sum
from quorate.data.source import Source
from quorate.replica.buffers import Buffers
from quorate.replica.flat import Layout
from quorate.replica.model import bind, trainable
from quorate.replica.shard_sum import ShardSum
from quorate.transports.job import Training
from quorate.transports.processes.arena import Arena
from quorate.transports.processes.channel import ProcessesChannel

SHARDS = 4


class Owner:
    """A transport without processes: what was sent to whom, in order."""

    def __init__(self) -> None:
        model = nn.Linear(3, 1, bias=False)
        masters = Layout(trainable(model).items()).shared()
        bind(trainable(model), masters)
        kinds: dict[str, Any] = {"mutable_frozen": (), "results": SHARDS, "on_snapshots": False}
        self.arena = Arena.create(model, masters, None, **kinds, workers=SHARDS)
        self.tickets = itertools.count()
        self.buffers = Buffers(model, ())
        self.sent: list[dict[str, Any]] = []

    def tell(self, worker: int, message: dict[str, Any]) -> None:
        self.sent.append({**message, "worker": worker})

    def cancel(self, worker: int, ticket: int) -> None: ...
    def replace(self, worker: int, reason: str) -> None: ...
    def begin(self, channel: ProcessesChannel) -> None: ...
    def forget(self, channel: ProcessesChannel) -> None: ...
    def pump(self, timeout_s: float | None) -> None: ...
    def wake(self) -> None: ...


def opened() -> tuple[Owner, ProcessesChannel]:
    owner = Owner()
    plan = Plan(rows=8, batch_size=8, shards=SHARDS, seed=0)
    source = Source(TensorDataset(torch.ones(8, 3)), plan)
    return owner, ProcessesChannel(owner, Training(source, owner.arena.parameters, range(2)), 1)


def computing(owner: Owner, channel: ProcessesChannel, *shards: int) -> list[dict[str, Any]]:
    """Have worker w compute the w-th of these shards of step 0; return what each was told."""
    for worker, shard in enumerate(shards):
        channel.send(Compute(worker, 0, shard, "", is_needed=True))
    return owner.sent[-len(shards) :]


def answer(told: dict[str, Any], **others: Any) -> dict[str, Any]:
    metrics = {"loss": float(told["shard"])}
    done = {"weight": 1.0, "metrics": metrics, "missing": [], "totals": {}}
    return {"kind": "done", "ticket": told["ticket"], **done, **others}


def group_of(*told: dict[str, Any], apart: Callable[[], None]) -> dict[str, Any]:
    """Return the answer of the last one, in whose slot the sum of all is."""
    group = [(each["worker"], answer(each)) for each in told]
    return answer(told[-1], group=group, apart=apart)


def write(owner: Owner, told: dict[str, Any], value: float) -> None:
    owner.arena.slot(told["slot"]).flat.views["weight"].fill_(value)


def events(channel: ProcessesChannel) -> list[Any]:
    return [channel.receive(0.0) for _ in range(len(channel._events))]


def total(channel: ProcessesChannel) -> ShardSum:
    return tree_sum(channel.collect(0, ()), SHARDS, ShardSum.add)


def never() -> None:
    pytest.fail("they count")


def test_a_group_is_in_the_sum_once() -> None:
    owner, channel = opened()
    free = len(channel._free)
    told = computing(owner, channel, 0, 1, 2, 3)
    for each, value in zip(told, (100.0, 3.0, 10.0, 20.0), strict=True):
        write(owner, each, value)  # shard 0's own is in the 3 of worker 1's slot
    channel.done(1, group_of(told[0], told[1], apart=never))
    channel.done(2, answer(told[2]))
    channel.done(3, answer(told[3]))
    assert events(channel) == [Done(worker, 0, worker) for worker in range(4)]
    for worker in range(4):
        channel.send(Keep(worker, 0, worker))
    found = total(channel)
    assert found.gradient is not None
    assert found.gradient.views["weight"].eq(33.0).all()
    assert found.weight == 4.0
    assert found.metrics == {"loss": 6.0}
    assert [share.worker for share in found.shares] == [0, 1, 2, 3]
    channel.publish()
    assert len(channel._free) == free


def test_a_group_comes_apart_if_a_copy_was_first() -> None:
    owner, channel = opened()
    asked = []
    told = computing(owner, channel, 0, 1, 0)
    group = group_of(told[0], told[1], apart=lambda: asked.append("apart"))
    # 1. The copy is done, and nobody has decided on it. 2. It is kept. 3. It is added to another.
    channel.done(2, answer(told[2]))
    channel.done(1, group)
    assert events(channel) == [Done(2, 0, 0)]
    channel.send(Keep(2, 0, 0))
    channel.done(1, group)
    assert asked == ["apart"] * 2
    channel.done(1, answer(told[1]))
    channel.done(0, answer(told[0]))
    assert events(channel) == [Done(1, 0, 1), Done(0, 0, 0)]
    channel.send(Keep(1, 0, 1))
    channel.send(Discard(0, 0, 0))


def test_a_group_comes_apart_if_one_of_its_workers_has_left() -> None:
    owner, channel = opened()
    asked = []
    told = computing(owner, channel, 0, 1)
    channel.left(0, "was killed", crashed=False)
    channel.done(1, group_of(told[0], told[1], apart=lambda: asked.append("apart")))
    assert asked == ["apart"]
    assert channel.is_computing(1)


def run_of(owner: Owner, channel: ProcessesChannel, worker: int, count: int) -> dict[str, Any]:
    """Have a worker compute the first shards as a run, whose sum is 33; return its answer."""
    channel.send(Compute(worker, 0, 0, "", is_needed=True, count=count))
    told = owner.sent[-1]
    write(owner, told, 33.0)
    first, *more = (answer({**told, "shard": shard}) for shard in range(count))
    return {**first, "more": more, "sums": [[level_of(count), 0]]}


def level_of(count: int) -> int:
    return (count - 1).bit_length()


def test_a_run_that_came_as_a_sum() -> None:
    owner, channel = opened()
    free = len(channel._free)
    channel.done(0, run_of(owner, channel, 0, SHARDS))
    assert events(channel) == [Done(0, 0, 0)]
    channel.send(Keep(0, 0, 0, SHARDS))
    found = total(channel)
    assert found.gradient is not None
    assert found.gradient.views["weight"].eq(33.0).all()
    assert found.metrics == {"loss": 6.0}
    assert [share.shard for share in found.shares] == [*range(SHARDS)]
    channel.publish()
    assert len(channel._free) == free


@pytest.mark.parametrize("is_added", [False, True])
def test_a_sum_stands_for_what_others_brought_of_it(is_added: bool) -> None:
    owner, channel = opened()
    free = len(channel._free)
    run = run_of(owner, channel, 0, SHARDS)
    # Copies of its last two shards are first.
    for worker, shard in ((1, 2), (2, 3)):
        channel.send(Compute(worker, 0, shard, "", is_needed=True))
        told = owner.sent[-1]
        write(owner, told, 10.0)
        channel.done(worker, answer(told))
        channel.send(Keep(worker, 0, shard))
    events(channel)
    if is_added:
        assert channel.receive(0.0) is None
        assert [*channel._sums[0].parts] == [(1, 1)]
    channel.done(0, run)
    assert events(channel) == [Done(0, 0, 0)]
    for shard, effect in enumerate((Keep, Keep, Discard, Discard)):
        channel.send(effect(0, 0, shard))
    found = total(channel)
    assert found.gradient is not None
    assert found.gradient.views["weight"].eq(33.0).all()
    assert found.weight == 4.0
    channel.publish()
    assert len(channel._free) == free


def test_a_sum_that_others_brought_all_of() -> None:
    owner, channel = opened()
    free = len(channel._free)
    channel.done(0, run_of(owner, channel, 0, 2))
    events(channel)
    for shard in range(2):
        channel.send(Discard(0, 0, shard))
    assert len(channel._free) == free


def test_the_place_of_a_worker_is_told() -> None:
    _, channel = opened()
    channel.joined(1, "a node")
    (event,) = events(channel)
    assert isinstance(event, Joined)
    assert event.place == "a node"
