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
    with state.optimizer.evaluating():
        files = {"model.safetensors": state.tensors()}
        if state.optimizer.has_modes:  # these are there within the block alone
            files["model.safetensors"] = _copied(files["model.safetensors"], {})
    if state.average is not None:
        files["averaged.safetensors"] = state.tensors(state.average.shadow)
    if rest := _rest(state):
        files["rest.safetensors"] = rest
    moments, kept = state.optimizer_state.save()
    files["optimizer.safetensors"] = moments
    record = {
        "format": FORMAT,
        "global_step": state.global_step,
        **facts,
        "order": list(files["model.safetensors"]),
        **kept,
        "amendments": state.user_changes.amendments.to_json(),
    }
    memory = {} if spare is None else spare.files
    return Contents(
        {name: _copied(part, memory.get(name, {})) for name, part in files.items()}, record
    )


def load(path: Path, record: dict[str, Any], state: State) -> list[str]:
    """Bring a state to a checkpoint that is sound; return lines to say.

    Raises:
        CheckpointError: a tensor is missing, is not the model's, or has another shape.
    """
    _put(tensors(path, "model.safetensors"), state.tensors(), path)
    if state.average is not None:
        if "averaged.safetensors" not in record["files"]:
            raise CheckpointError(
                f"{path}: it has no averaged parameters, and ema_decay is set; leave it out, or "
                "choose another run_dir"
            )
        averaged = tensors(path, "averaged.safetensors")
        _take(averaged, state.tensors(state.average.shadow))
    lines = []
    if "rest.safetensors" in record["files"]:
        lines = _take(tensors(path, "rest.safetensors"), _rest(state))
    moments = tensors(path, "optimizer.safetensors")
    state.optimizer_state.load(moments, record, path)
    if (amendments := record.get("amendments")) is not None:  # not in those of before it existed
        state.user_changes.load(amendments)
    state.global_step = record["global_step"]
    return lines


def _rest(state: State) -> dict[str, torch.Tensor]:
    """Return what state dicts leave out, plain and averaged."""
    left_out = state.rest()
    if state.optimizer.has_modes:  # the model's file has those to be evaluated
        left_out |= state.parameters.views
    rest = {f"model.{name}": tensor for name, tensor in left_out.items()}
    if state.average is not None:
        left_out = state.rest(state.average.shadow)
        rest |= {f"averaged.{name}": tensor for name, tensor in left_out.items()}
    return rest


@torch.no_grad()
def _take(values: dict[str, torch.Tensor], targets: dict[str, torch.Tensor]) -> list[str]:
    """Copy values where there is a place for them; return lines of those that have none."""
    lines = []
    for name, value in values.items():
        target = targets.get(name)
        if target is not None and target.shape == value.shape:
            target.copy_(value)
        else:
            now = "is there no more" if target is None else f"is {tuple(target.shape)}"
            lines.append(
                f"{name}: it was {tuple(value.shape)} and {now}: it is as the script makes it"
            )
    return lines


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
