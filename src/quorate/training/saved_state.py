"""A state as tensors and a record, which a checkpoint holds; and a state again from those."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from quorate.errors import CheckpointError
from quorate.services.checkpoints.files import FORMAT, Contents, tensors
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
    state.user_changes.look()
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
        "format": FORMAT,
        "global_step": state.global_step,
        **facts,
        "order": list(files["model.safetensors"]),
        "optimizer": type(state.optimizer.inner).__name__,
        "optimizer_numbers": numbers,
        "amendments": state.user_changes.amendments.to_json(),
    }
    memory = {} if spare is None else spare.files
    return Contents(
        {name: _copied(part, memory.get(name, {})) for name, part in files.items()}, record
    )


def load(path: Path, record: dict[str, Any], state: State) -> None:
    """Bring a state to a checkpoint that is sound.

    Raises:
        CheckpointError: a tensor is missing, is not the model's, or has another shape.
    """
    optimizer = type(state.optimizer.inner).__name__
    if record["optimizer"] != optimizer:
        raise CheckpointError(
            f"{path}: it was trained with {record['optimizer']}, and this run has {optimizer}; use "
            "the same optimizer, or choose another run_dir"
        )
    _put(tensors(path, "model.safetensors"), state.tensors(), path)
    if state.average is not None:
        if "averaged.safetensors" not in record["files"]:
            raise CheckpointError(
                f"{path}: it has no averaged parameters, and ema_decay is set; leave it out, or "
                "choose another run_dir"
            )
        averaged = tensors(path, "averaged.safetensors")
        for name, view in state.average.shadow.views.items():
            view.copy_(averaged[name])
    entries: dict[str, dict[str, Any]] = {name: {} for name in state.parameters.views}
    for key, value in tensors(path, "optimizer.safetensors").items():
        entry, _, name = key.partition(".")
        if name not in entries:
            raise CheckpointError(f"{path}: optimizer state {key!r} is of no trainable parameter")
        entries[name][entry] = value
    for name, values in record["optimizer_numbers"].items():
        entries[name].update(values)
    state.optimizer.load_state(entries)
    if (amendments := record.get("amendments")) is not None:  # not in those of before it existed
        state.user_changes.load(amendments)
    state.go_to(record["global_step"])


def _put(values: dict[str, torch.Tensor], targets: dict[str, torch.Tensor], path: Path) -> None:
    for name in targets.keys() | values.keys():
        here = tuple(targets[name].shape) if name in targets else "no such tensor"
        there = tuple(values[name].shape) if name in values else "no such tensor"
        if here != there:
            raise CheckpointError(
                f"{path}: {name}: the checkpoint has {there}, the model {here}; train the model "
                "that was saved, or choose another run_dir"
            )
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(values[name])


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
