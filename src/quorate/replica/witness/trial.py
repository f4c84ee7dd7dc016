"""The trial: a shard is computed before training, to find the parameters written by forward.

The values of all parameters are compared: torch does not count a write by ``.data``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, TypeVar

import torch

from quorate.machine.text import abridged_names
from quorate.replica.compiling import as_written
from quorate.replica.model import frozen, trainable
from quorate.replica.replica import Replica
from quorate.replica.torch_internals import version
from quorate.replica.witness.data_writes import WriteWatch, names_data
from quorate.replica.witness.guard import parameter_text, written_by_kind

T = TypeVar("T")

MOST_COPIED = 1 << 23  # elements of a frozen parameter; of a larger one a sum is compared


class WriteSet(NamedTuple):
    """The parameters that a model's forward pass writes, and those with gradients by rows."""

    trained: frozenset[str]  # names of trained parameters
    frozen: frozenset[int]  # numbers of frozen parameters, in the model's order
    by_rows: frozenset[str] = frozenset()  # names of parameters whose gradient is kept by rows

    def union(self, other: WriteSet) -> WriteSet:
        """Return the union of both."""
        by_rows = self.by_rows | other.by_rows
        return WriteSet(self.trained | other.trained, self.frozen | other.frozen, by_rows)

    def covers(self, other: WriteSet) -> bool:
        """Return whether all of the other is contained in this."""
        return all(new <= old for new, old in zip(other, self, strict=True))


NOTHING = WriteSet(frozenset(), frozenset())


class _WriteMark(NamedTuple):
    parameter: torch.nn.Parameter
    data: torch.Tensor  # its memory
    version: int
    value: torch.Tensor


def written_in(replica: Replica, compute: Callable[[], T], known: WriteSet) -> tuple[WriteSet, T]:
    """Compute a shard; return the parameters written, or possibly written, and the result.

    Parameters are restored afterwards.

    Args:
        replica: the replica for the computation.
        compute: computes the shard.
        known: parameters already treated as written, not checked.
    """
    model, replica.witness.is_silent = replica.model, True
    trained = {n: p for n, p in trainable(model).items() if n not in known.trained}
    numbers = {name: number for number, (name, _) in enumerate(model.named_parameters())}
    still = {n: p for n, p in frozen(model).items() if numbers[n] not in known.frozen}
    before = _looked_at(trained), _looked_at(still)
    try:
        try:
            result = compute()
        finally:  # after a mistake of the script, another setting may be tried from the start
            changed = [
                {name for name, seen in each.items() if _was_written(seen)} for each in before
            ]
            _restore_all(before, changed)
        if names_data(model, replica.loss_call.loss) and not replica.compiles_loss:
            buffers = model.buffers()  # a replica writes buffers; some may be parameters elsewhere
            watch = WriteWatch({**trained, **still}, buffers)
            with suppress(Exception), as_written(), watch:
                compute()
            changed = [
                each | (watch.found & of.keys()) for each, of in zip(changed, before, strict=True)
            ]
            _restore_all(before, changed)
    finally:
        replica.witness.is_silent = False
    found = changed[0] | (written_by_kind(model) & trained.keys())
    numbers_of = frozenset(numbers[name] for name in changed[1])
    return WriteSet(frozenset(found), numbers_of), result


def written_text(model: torch.nn.Module, names: frozenset[str]) -> list[str]:
    """Return the message about the trained parameters that a forward pass writes."""
    if not names:
        return []
    texts = [parameter_text(model, name) for name in sorted(names)]
    return [
        f"forward writes {abridged_names(texts)}: all shards of a step compute from the same "
        "values, and the values that the first shard wrote enter the parameters before the update"
    ]


def _looked_at(parameters: Mapping[str, torch.nn.Parameter]) -> dict[str, _WriteMark]:
    return {name: _WriteMark(p, p.data, version(p), _value(p)) for name, p in parameters.items()}


def _was_written(seen: _WriteMark) -> bool:
    parameter, data, counted, value = seen
    if version(parameter) != counted or parameter.data_ptr() != data.data_ptr():
        return True
    return not _are_same(_value(parameter), value)


def _restore_all(seen: Sequence[Mapping[str, _WriteMark]], names: Sequence[set[str]]) -> None:
    for each, changed in zip(seen, names, strict=True):
        for name in changed:
            _restore(each[name])


def _restore(seen: _WriteMark) -> None:
    if seen.value.shape == seen.data.shape:  # otherwise a sum
        seen.data.copy_(seen.value)
    seen.parameter.data = seen.data


def _value(parameter: torch.Tensor) -> torch.Tensor:
    """Return a copy of a parameter; for a large frozen parameter, sums that detect most changes."""
    tensor = parameter.detach()
    if parameter.requires_grad or tensor.numel() <= MOST_COPIED or not tensor.is_floating_point():
        return tensor.clone()
    return torch.stack([tensor.sum(dtype=torch.float32), tensor.abs().sum(dtype=torch.float32)])


def _are_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    # NaN counts as equal to NaN.
    return torch.equal(one, other) or torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))
