"""Servers in this process: orders of arrival and decision that a run shows by chance alone."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from quorate.engines.messages import pack, unpack
from quorate.engines.partition import Partition
from quorate.engines.servers import Answer, Image, RemoteGradient, Told, as_image
from quorate.replica.flat import Flat
from quorate.replica.shard_sum import ShardSum
from quorate.services.checkpoints.files import record_of
from quorate.services.checkpoints.writer import write
from quorate.training.optimizing.known_optimizers import put_values, sent_values
from quorate.training.optimizing.optimize import Optimize
from quorate.training.optimizing.owners import Owners
from quorate.training.owners import slice_files
from quorate.training.owners.server_owners import ServerStandIn
from quorate.training.owners.server_slice import ServerSlice
from quorate.training.owners.server_sync import let_servers_own
from quorate.training.owners.spread_optimizer import SpreadOptimizer
from quorate.training.saved_state import contents, load, loadable
from quorate.training.state import State

CPU = torch.device("cpu")
SHARDS, SPOILT = 12, 5  # the gradient of the latter is not finite


class ServersHere:
    """Servers of this process."""

    have_newest = False

    def __init__(self, count: int) -> None:
        self.count, self.where = count, ["here"] * count
        self.slices = [ServerSlice() for _ in range(count)]
        self._images: list[Image] = []

    def take(self, ticket: int, gradient: Flat) -> None:
        partition = Partition.among(gradient.layout, self.count)
        for number, slice_ in enumerate(self.slices):
            slice_.take(ticket, as_image(partition.views(gradient, number)))

    def keep(self, ticket: int, step: int, shard: int, leaves: int) -> None:
        for slice_ in self.slices:
            slice_.keep(ticket, step, shard, leaves)

    def drop(self, ticket: int) -> None:
        for slice_ in self.slices:
            slice_.drop(ticket)

    def ask(self, told: Sequence[Told], images: Sequence[Image] = ()) -> list[Answer]:
        values = images or [as_image([])] * self.count
        return [s.do(*own) for s, *own in zip(self.slices, told, values, strict=True)]

    def renew(self, told: Sequence[Told], images: Sequence[Image] = ()) -> list[Told]:
        answers = self.ask(told, images)
        self._images = [image.copy() for _, image in answers]
        return [answer for answer, _ in answers]

    def values(self) -> list[Image]:
        return self._images


def new_state(*, served: bool) -> State:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 700), nn.Linear(700, 300).double())  # four blocks each
    model.append(nn.Conv2d(70, 80, 3)).to(memory_format=torch.channels_last)  # not row by row
    optimize = Optimize(lambda own: torch.optim.Adam(own, lr=0.1), clip_norm=0.5, ema_decay=0.9)
    owners = ServerStandIn if served else Owners
    options: dict[str, Any] = {"optimize": {None: optimize}, "owners": owners}
    return State(model, CPU, shared=False, loss=lambda *_: None, **options)


def trained(count: int) -> list[torch.Tensor]:
    """Return parameters, averages and momenta after an update by each shard, in a mixed order.

    Args:
        count: the number of servers; 0: none.
    """
    state = new_state(served=count > 0)
    servers, layout = ServersHere(count), state.parameters.layout
    gradients = [layout.new(CPU) for _ in range(SHARDS)]
    for vector in (vector for gradient in gradients for vector in gradient.vectors):
        vector.normal_()
    gradients[SPOILT].vectors[-1][-1] = float("inf")  # on the last server alone
    with let_servers_own(state, servers, print) if count else nullcontext():
        state.owners.send_user_changes(bool)
        # Shard s has ticket s. A copy of shard s has ticket 100 + s; all copies are dropped.
        arrivals, decisions = [*range(SHARDS), *range(100, 100 + SHARDS)], [*range(SHARDS)]
        for tickets in (arrivals, decisions):
            Random(1).shuffle(tickets)
        arrived = set[int]()
        for ticket in arrivals:
            arrived.add(ticket)
            servers.take(ticket, gradients[ticket % 100])
            while decisions and decisions[0] in arrived:
                shard = decisions.pop(0)
                servers.keep(shard, shard, 0, 1)
                servers.drop(100 + shard)
                gradient = RemoteGradient(shard, shard) if count else gradients[shard]
                total = ShardSum(2.0, {"loss": 1.0}, gradient, missing=frozenset())
                applied = state.update.apply([((0, 0), total)], shards=1, present=1)
                if applied.not_finite is not None:
                    assert shard == SPOILT
                    state.update.skip()
    assert state.update.updates == SHARDS
    assert state.average is not None
    entries = [entry for own in state.optimizer.state().values() for entry in own.values()]
    return [*state.parameters.vectors, *state.average.shadow.vectors, *entries]


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_updates_by_shard_have_the_bits_of_updates_without_servers(count: int) -> None:
    for own, expected in zip(trained(count), trained(0), strict=True):
        assert torch.equal(own, expected)


@pytest.mark.parametrize(("sees", "count"), [(True, 3), (False, 3), (True, 1)])
def test_servers_write_and_read_their_own_parts_of_a_checkpoint(
    sees: bool, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slice_files, "GATHERED_BYTES", 0)
    if not sees:
        monkeypatch.setattr(slice_files, "sign", lambda *_: "it does not see it")
        monkeypatch.setattr(slice_files, "sees", lambda *_: False)
    state, said = new_state(served=True), list[str]()
    servers, optimizer = ServersHere(count), state.optimizer
    with let_servers_own(state, servers, said.append):
        state.owners.send_user_changes(bool)
        gradient = state.parameters.layout.new(CPU)
        for vector in gradient.vectors:
            vector.normal_()
        servers.take(0, gradient)
        servers.keep(0, 0, 0, 1)
        total = ShardSum(2.0, {"loss": 1.0}, RemoteGradient(0, 0), missing=frozenset())
        assert state.update.apply([((0, 0), total)], shards=1, present=1).not_finite is None
        facts = {"epoch": 0, "seed": 0, "shards": 1, "batch_size": 1, "rows": 9, "shuffle": False}
        facts |= {"update": "sync", "account": state.account(), "ema_decay": 0.9}
        with monkeypatch.context() as patch:
            patch.setattr(optimizer, "fetch", None)  # no value comes to the coordinator
            path = write(tmp_path, contents(state, facts))
        assert len(said) == (0 if sees else 3)
        found = load_file(path / slice_files.OPTIMIZER)
    expected = {f"{e}.{n}": v for n, own in optimizer.state().items() for e, v in own.items()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], value) for key, value in expected.items())
    # Read by servers; then all of the state in this process.
    for begins in (True, False):
        later = new_state(served=True)
        own = later.optimizer
        load(loadable(path, record_of(path), later), later)
        assert isinstance(own, SpreadOptimizer)
        assert own.unread is not None
        with let_servers_own(later, ServersHere(2), print):
            if begins:
                later.owners.send_user_changes(bool)
        assert (own.unread is None) is begins  # else nobody has needed the values
        with own.whole_state():
            read = {f"{e}.{n}": v for n, each in own.state().items() for e, v in each.items()}
        assert all(torch.equal(read[key], value) for key, value in expected.items())


def test_values_of_a_group_arrive_in_the_tensors_tuples_and_lists_of_an_owner() -> None:
    """Fill tensors of the owner in place: betas of Adam may be tensors."""
    sent = sent_values({"params": [], "lr": torch.tensor(0.5), "betas": (torch.tensor(0.25), 0.75)})
    assert sent == {"lr": 0.5, "betas": (0.25, 0.75)}
    lr, beta = torch.tensor(1.0), torch.tensor(1.0)
    own = {"lr": lr, "betas": (beta, 0.5), "kept": [1]}
    put_values(own, unpack(pack({**sent, "kept": [2, 3]})))
    assert (lr, beta) == (0.5, 0.25)
    assert own == {"lr": lr, "betas": (beta, 0.75), "kept": [2, 3]}
    assert sent_values({"call": print, "many": torch.zeros(2), "pair": (torch.zeros(2), 1)}) == {}
