"""Sharing: rank 0 sends the state when a loop begins, and the changes by user code later."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch

from quorate.engines.collective.rank_control import RankControl, Record
from quorate.engines.model_changes import ModelChanges
from quorate.replica.beside.values import NO_VALUES, Values
from quorate.replica.digest import flat_bytes
from quorate.services.checkpoints.draft import Contents
from quorate.training.saved_state import Loadable, load
from quorate.training.state import State

OPTIMIZER = "optimizer.safetensors"
SHARED = "shared"  # a key of records, for the values of ``Shared``
_PIECE = 4 << 20  # elements sent at a time
_ROW = 1024  # words of a sum
_AT_A_TIME = 16 << 20  # bytes: intermediate results take memory on a GPU


def header(shared: Contents, state: State) -> Record:
    """Return the record of a state: everything except the values of tensors."""
    flat = _in_vectors(shared, state)
    return {
        "files": {
            name: {
                key: [_dtype(value), list(value.shape), value.data_ptr() in flat[name]]
                for key, value in part.items()
            }
            for name, part in shared.files.items()
            if not name.startswith("averaged")  # rank 0 alone needs an average
        },
        "record": shared.record,
    }


def send(ranks: RankControl, shared: Contents, state: State) -> None:
    """Send the tensors of a state to all ranks. Blocks.

    Parameters are sent from the flat vectors of rank 0, and received in the flat vectors of each
    rank. Of entries with a value per element, each rank receives only its own part: see
    ``SlicedOptimizer.scatter``.
    """
    others, flat = range(1, ranks.size), _in_vectors(shared, state)
    for vector in state.parameters.vectors:
        for piece in torch.split(vector, _PIECE):
            ranks.swap([(rank, piece) for rank in others], [])
    for name, part in shared.files.items():
        if not name.startswith("averaged"):
            for value in part.values():
                if value.data_ptr() not in flat[name]:
                    on = value.to(ranks.device).contiguous()
                    ranks.swap([(rank, on) for rank in others], [])


def misfit(ranks: RankControl, described: Record, state: State) -> str:
    """Return how this rank's model differs from rank 0's, in words; an empty text if equal."""
    model, own = described["files"]["model.safetensors"], state.tensors()
    for key in [*own, *(model.keys() - own.keys())]:
        here = _described(own.get(key))
        there = f"{tuple(model[key][1])} of {model[key][0]}" if key in model else _described(None)
        if here != there:
            return (
                f"rank {ranks.rank}: {key} of the model is {here}, and {there} on rank 0; make the "
                "script repeatable: every rank runs it"
            )
    return ""


def take(ranks: RankControl, described: Record, state: State) -> None:
    """Receive the state of rank 0, and load the state. Blocks."""
    for vector in state.parameters.vectors:
        for piece in torch.split(vector, _PIECE):
            ranks.swap([], [(0, piece)])
    files: dict[str, dict[str, torch.Tensor]] = {}
    places = {**state.tensors(), **{f"model.{n}": v for n, v in state.parameters.views.items()}}
    for name, part in described["files"].items():
        files[name] = {}
        for key, (dtype, shape, is_there) in part.items():
            if is_there:
                files[name][key] = places[key]
                continue
            value = torch.empty(shape, dtype=getattr(torch, dtype), device=ranks.device)
            ranks.swap([], [(0, value)])
            files[name][key] = value.cpu()
    record: dict[str, Any] = described["record"]
    where, model = Path("rank 0"), files["model.safetensors"]
    rest = {
        key: value
        for key, value in files.get("rest.safetensors", {}).items()
        if key.startswith("model.")
    }
    optimizer = state.optimizer_state.loadable(files[OPTIMIZER], record, where)
    load(Loadable(model, {}, rest, optimizer, record, []), state)


class Sender:
    """The sender of ``Shared`` on rank 0: values set by user code travel with the next step.

    Args:
        ranks: the connections to all ranks.
    """

    def __init__(self, ranks: RankControl) -> None:
        self.ranks = ranks
        self._sent = NO_VALUES
        self._vectors: list[torch.Tensor] = []  # to be sent: all ranks wait for these tensors

    def put(self, values: Values, record: Record) -> None:
        """Put changed values into a record; call ``send`` after the record is sent."""
        before, self._sent = self._sent, values
        if values.number != before.number:
            is_stored = values.stored != before.stored
            record[SHARED] = values.to_json(stored=is_stored)
            self._vectors = [v for v in values.tensors.vectors if is_stored and v.numel()]

    def send(self) -> None:
        """Send the tensors of the values in the last record. Blocks."""
        while self._vectors:
            on = self._vectors.pop(0).to(self.ranks.device)
            for rank in range(1, self.ranks.size):
                self.ranks.swap([(rank, on)], [])


class Taker:
    """The receiver of ``Shared`` on all ranks but rank 0.

    Args:
        ranks: the connections to all ranks.
    """

    def __init__(self, ranks: RankControl) -> None:
        self._ranks = ranks
        self.values = NO_VALUES

    def take(self, record: Record) -> Values:
        """Receive the values in a record, and the tensors sent after the record. Blocks.

        Returns:
            The present values.
        """
        if SHARED in record:
            sent = record[SHARED]
            self.values = self.values.from_json(sent)
            for vector in self.values.tensors.vectors if sent["tensors"] is not None else ():
                if vector.numel():
                    taken = torch.empty_like(vector, device=self._ranks.device)
                    self._ranks.swap([], [(0, taken)])
                    vector.copy_(taken)
        return self.values


def take_changes(ranks: RankControl, sent: Record, state: State) -> None:
    """Receive and apply the changes of user code to rank 0's model between two updates. Blocks."""
    for value in values(state):
        taken = value.contiguous()
        ranks.swap([], [(0, taken)])
        if taken is not value:
            value.copy_(taken)
    ModelChanges.from_json(sent).apply(state.model, state.user_changes.trained())


def values(state: State) -> list[torch.Tensor]:
    """Return the tensors of a model that user code may have changed, and that ranks have copies of.

    The tensors are parameters and buffers, without parameters shared by all ranks in memory.
    """
    is_one = state.exchange is not None and state.exchange.has_one_copy
    vectors = [] if is_one else state.parameters.vectors
    named = [*state.user_changes.frozen().values(), *vectors]
    return [*named, *(buffer for buffer in state.model.buffers() if buffer.numel())]


def mark(state: State) -> list[bytes]:
    """Return checksums of ``values``, to find changed or replaced tensors: a pass over memory."""
    return [_sums(value) for value in values(state)]


def groups(state: State) -> list[dict[str, Any]]:
    """Return the values in the optimizer's groups that JSON can hold; tensors as numbers."""
    listed = []
    for group in state.optimizer.param_groups:
        kept: dict[str, Any] = {}
        for name, value in group.items():
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                kept[name] = value.item()
            elif isinstance(value, (bool, int, float, str, type(None))) or _is_plain(value):
                kept[name] = value
        listed.append(kept)
    return listed


def take_groups(state: State, listed: list[dict[str, Any]]) -> None:
    """Set the values of rank 0 in the optimizer's groups."""
    for group, kept in zip(state.optimizer.param_groups, listed, strict=True):
        for name, value in kept.items():
            there = group.get(name)
            if isinstance(there, torch.Tensor):
                there.fill_(value)
            else:
                group[name] = tuple(value) if isinstance(value, list) else value


def _is_plain(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(v, (bool, int, float)) for v in value)


def _sums(value: torch.Tensor) -> bytes:
    """Return a weighted sum for each row of memory; each word of a row has its own weight."""
    plain = flat_bytes(value.detach())
    if plain.data_ptr() % 4:
        plain = plain.clone()
    rest = torch.zeros(4 * _ROW, dtype=torch.uint8, device=plain.device)
    cut = plain.numel() - plain.numel() % len(rest)
    rest[: plain.numel() - cut] = plain[cut:]
    weights = _weights(plain.device)
    found = []
    for stretch in (*torch.split(plain[:cut], _AT_A_TIME), rest):
        rows = stretch.view(torch.int32).view(-1, _ROW)
        # The sum wraps around. GPUs cannot multiply an integer matrix by an integer vector.
        of_cpu = plain.device.type == "cpu"
        found.append(rows @ weights if of_cpu else (rows * weights).sum(1, dtype=torch.int32))
    return torch.cat(found).cpu().numpy().tobytes()


@cache
def _weights(device: torch.device) -> torch.Tensor:
    """Return odd weights: with an odd weight, any change of a single word changes the sum."""
    numbers = torch.arange(_ROW, dtype=torch.int64) * 0x9E3779B1 * 2 + 1
    return (numbers & 0x7FFFFFFF).to(device, torch.int32)


def _in_vectors(shared: Contents, state: State) -> dict[str, set[int]]:
    """Return for each file the addresses of tensors that lie in the flat vectors."""
    found = {view.data_ptr() for view in state.parameters.views.values() if view.numel()}
    if state.optimizer.has_modes:  # the file of the model has different tensors
        found = set()
    return {name: set() if name == OPTIMIZER else found for name in shared.files}


def _dtype(value: torch.Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def _described(value: torch.Tensor | None) -> str:
    return "not there" if value is None else f"{tuple(value.shape)} of {_dtype(value)}"
