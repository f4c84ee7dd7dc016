"""A state as tensors and a record, which a checkpoint holds; and a state again from those."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

from quorate.errors import CheckpointError, MisfitError
from quorate.machine.printable import printable
from quorate.services.checkpoints.files import Contents, tensors
from quorate.services.checkpoints.tensor_file import header
from quorate.training.state import State


def contents(state: State, facts: dict[str, Any], spare: Contents | None = None) -> Contents:
    """Copy a state, between two updates.

    Args:
        facts: what goes into state.json beside the state's own: shards, seed, devices, ...
        spare: an earlier copy that nobody reads any more. Its memory is used again: pages that the
            kernel has yet to find and to clear take four times as long.

    Raises:
        CheckpointError: the optimizer keeps what is neither tensor nor number.
    """
    files = {"model.safetensors": state.tensors()}
    if state.average is not None:
        files["averaged.safetensors"] = state.tensors(state.average.shadow)
    numbers: dict[str, dict[str, Any]] = {}
    moments: dict[str, torch.Tensor] = {}
    for name, entries in state.optimizer.state().items():
        for entry, value in entries.items():
            if isinstance(value, torch.Tensor):
                moments[f"{entry}.{name}"] = value
            elif value is None or isinstance(value, (bool, int, float, str)):
                numbers.setdefault(name, {})[entry] = value
            else:
                kind = type(value).__name__
                raise CheckpointError(
                    f"optimizer state {entry!r} of {name!r} is a {kind}, and only tensors and "
                    "numbers are saved; use another optimizer, or no run_dir"
                )
    files["optimizer.safetensors"] = moments
    record = {
        "global_step": state.global_step,
        **facts,
        "order": list(files["model.safetensors"]),
        "optimizer": type(state.optimizer.inner).__name__,
        "optimizer_numbers": numbers,
    }
    memory = {} if spare is None else spare.files
    return Contents(
        {name: _copied(part, memory.get(name, {})) for name, part in files.items()}, record
    )


class Loadable(NamedTuple):
    """A checkpoint that fits a state, read and compared: what is left cannot fail half-way."""

    model: dict[str, torch.Tensor]
    averaged: dict[str, torch.Tensor]  # empty without an average
    optimizer: dict[torch.Tensor, dict[str, Any]]
    record: dict[str, Any]


def loadable(path: Path, record: dict[str, Any], state: State) -> Loadable:
    """Read a checkpoint that is sound, and compare all of it with a state. Nothing is changed.

    Raises:
        MisfitError: a tensor is missing, is not the model's, or has another shape or dtype.
        CheckpointError: it was saved with other settings, so that something is not in it.
    """
    # 1. By the record and the headers alone: nothing of the size of a model is read in vain.
    optimizer = type(state.optimizer.inner).__name__
    if record["optimizer"] != optimizer:
        raise MisfitError(
            f"{path}: it was trained with {record['optimizer']}, and this run has {optimizer}; use "
            "the same optimizer, or choose another run_dir"
        )
    parts = [("model.safetensors", state.tensors())]
    if state.average is not None:
        if "averaged.safetensors" not in record["files"]:
            raise CheckpointError(
                f"{path}: it has no averaged parameters, and ema_decay is set; leave it out, or "
                "choose another run_dir"
            )
        parts.append(("averaged.safetensors", state.tensors(state.average.shadow)))
    for file, targets in parts:
        _require_same(path, file, targets)
    # 2. The tensors.
    read = {file: tensors(path, file) for file, _ in parts}
    averaged = read.get("averaged.safetensors", {})
    if state.average is not None and (left_out := state.average.shadow.views.keys() - averaged):
        raise CheckpointError(f"{path}: {min(left_out)}: it has no averaged values of it")
    entries: dict[str, dict[str, Any]] = {name: {} for name in state.parameters.views}
    for key, value in tensors(path, "optimizer.safetensors").items():
        entry, _, name = key.partition(".")
        _require_trainable(path, name, state)
        entries[name][entry] = value
    for name, values in record["optimizer_numbers"].items():
        _require_trainable(path, name, state)
        if twice := entries[name].keys() & values.keys():
            raise MisfitError(f"{path}: optimizer state {min(twice)!r} of {name!r} is there twice")
        entries[name].update(values)
    try:
        optimizer_state = state.optimizer.loadable(entries)
    except CheckpointError as error:
        raise MisfitError(f"{path}: {error}") from error
    return Loadable(read["model.safetensors"], averaged, optimizer_state, record)


@torch.no_grad()
def load(saved: Loadable, state: State) -> None:
    """Bring a state to a checkpoint."""
    for name, target in state.tensors().items():
        target.copy_(saved.model[name])
    if state.average is not None:
        for name, view in state.average.shadow.views.items():
            view.copy_(saved.averaged[name])
    state.optimizer.load(saved.optimizer)
    state.load_account(saved.record["account"])
    state.go_to(saved.record["global_step"])


def _require_trainable(path: Path, name: str, state: State) -> None:
    if name not in state.parameters.views:
        # A frozen one was trained before: another checkpoint may fit, and is not what was left.
        is_frozen = name in dict(state.model.named_parameters())
        kind = CheckpointError if is_frozen else MisfitError
        raise kind(f"{path}: optimizer state of {name!r}, which is no trainable parameter")


def _require_same(path: Path, file: str, targets: dict[str, torch.Tensor]) -> None:
    """Compare the names, shapes and dtypes in a file with a model's."""
    stored = header(path / file).tensors
    for name in [*targets, *(stored.keys() - targets.keys())]:
        target, saved = targets.get(name), stored.get(name)
        here = "no such tensor" if target is None else str(tuple(target.shape))
        there = "no such tensor" if saved is None else str(saved.shape)
        if target is not None and saved is not None and here == there:
            here, there = str(target.dtype), f"torch.{saved.dtype}"
        if here != there:
            raise MisfitError(
                f"{path}: {printable(name)}: the checkpoint has {there}, the model {here}; train "
                "the model that was saved, or choose another run_dir"
            )


def _copied(
    part: dict[str, torch.Tensor], memory: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    # Each by itself and contiguous, as safetensors wants them: the views share their vector.
    copies = {}
    for name, tensor in part.items():
        copy = memory.get(name)
        if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
            copy = torch.empty(tensor.shape, dtype=tensor.dtype)
        copies[name] = copy.copy_(tensor.detach())
    return copies
