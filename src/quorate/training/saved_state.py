"""Conversion of a state to tensors and a record for a checkpoint, and back."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from quorate.errors import CheckpointError, MisfitError
from quorate.machine.text import printable
from quorate.services.checkpoints import shared_values
from quorate.services.checkpoints.files import tensors
from quorate.services.checkpoints.tensor_file import header
from quorate.services.checkpoints.trees import TreeDecoder, TreeEncoder
from quorate.services.checkpoints.writer import Contents
from quorate.training.optimizing.optimizer_state import LoadableOptimizer
from quorate.training.owners.slice_files import OPTIMIZER
from quorate.training.state import State

CALLBACKS = "callbacks.safetensors"


def contents(state: State, facts: dict[str, Any], spare: Contents | None = None) -> Contents:
    """Copy a state between two updates; if all ranks hold parts, prepare a common save instead.

    Args:
        facts: facts for state.json beside the state's own: shards, seed, devices, ...
        spare: an earlier copy, not read any more. Its memory is reused: the kernel has to find and
            clear fresh pages, which takes four times as long.

    Raises:
        CheckpointError: the optimizer holds a value that is neither tensor nor number.
        ServerError: a server is gone.
    """
    state.bring_home()
    files = _files(state)
    encoder = TreeEncoder({})
    try:
        trees = {name: encoder.encode(kept, name) for name, kept in state.callbacks.items()}
    except CheckpointError as error:
        raise CheckpointError("state_dict() of a callback", error) from error
    facts = {**facts, "callbacks": trees}
    if encoder.tensors:
        files[CALLBACKS] = {name: value.contiguous() for name, value in encoder.tensors.items()}
    if state.saves is not None and state.saves.are_by_all:
        with state.saves.meta_state() as fill:
            files[OPTIMIZER], kept = state.phases.save()
        return Contents(files, _record(state, facts, files, kept), fill)
    with state.phases.whole_state():
        moments, kept = state.phases.save()
        files[OPTIMIZER] = moments
        memory = {} if spare is None else spare.files
        copies = {name: _copied(part, memory.get(name, {})) for name, part in files.items()}
    return Contents(copies, _record(state, facts, files, kept))


def _files(state: State) -> dict[str, dict[str, torch.Tensor]]:
    """Return the tensors of a state by file, except for the optimizer's."""
    state.model_edits.detect()
    with state.optimizer.evaluating():
        files = {"model.safetensors": state.tensors()}
        if state.optimizer.has_modes:  # these values exist inside the block alone
            files["model.safetensors"] = _copied(files["model.safetensors"], {})
    if state.average is not None:
        files["averaged.safetensors"] = state.tensors(state.average.shadow)
    if rest := _rest(state):
        files["rest.safetensors"] = rest
    if beside := state.model_edits.model_changes.shared.tensors.views:
        files[shared_values.FILE] = beside
    return files


def _record(
    state: State, facts: dict[str, Any], files: dict[str, Any], kept: dict[str, Any]
) -> dict[str, Any]:
    return {
        "global_step": state.global_step,
        **facts,
        "order": list(files["model.safetensors"]),
        **kept,
        "amendments": state.model_edits.model_changes.to_json(),
        "shared": state.model_edits.model_changes.shared.plain,
    }


class WeightCopies(NamedTuple):
    """Copies of all weights of a model, by file and name."""

    model: dict[str, torch.Tensor]
    averaged: dict[str, torch.Tensor]  # empty without an average
    rest: dict[str, torch.Tensor]  # tensors left out by state dicts


def weights(state: State) -> WeightCopies:
    """Copy the weights of a state, plain and averaged, and its buffers."""
    copies = {name: _copied(part, {}) for name, part in _files(state).items()}
    names = ("model", "averaged", "rest")
    return WeightCopies(*(copies.get(f"{name}.safetensors", {}) for name in names))


@torch.no_grad()
def take_weights(saved: WeightCopies, state: State) -> None:
    """Set the weights of a state. Without averaged weights, an average starts anew.

    The new average starts from the plain weights.
    """
    for name, target in state.tensors().items():
        target.copy_(saved.model[name])
    if state.average is not None:
        shadow = state.tensors(state.average.shadow)
        for name in state.averaged_names():
            shadow[name].copy_((saved.averaged or saved.model)[name])
    targets = _rest(state)
    for name, value in saved.rest.items():
        targets[name].copy_(value)


def weights_in(path: Path, record: dict[str, Any], state: State) -> tuple[WeightCopies, list[str]]:
    """Read the weights of a sound checkpoint, and compare them with a state.

    Returns:
        The weights, and lines for the user on tensors that are not used.

    Raises:
        MisfitError: a tensor is missing, is not the model's, or has another shape or dtype.
        CheckpointError: the checkpoint is no longer sound.
    """
    files = {"model.safetensors": state.tensors()}
    if state.average is not None and "averaged.safetensors" in record["files"]:
        files["averaged.safetensors"] = state.tensors(state.average.shadow)
    for file, targets in files.items():
        _require_same(path, file, targets)
    read = {file: tensors(path, record, file) for file in files}
    rest = tensors(path, record, "rest.safetensors")
    own = _rest(state)
    if "averaged.safetensors" not in files:
        rest = {name: value for name, value in rest.items() if not name.startswith("averaged.")}
        own = {name: value for name, value in own.items() if not name.startswith("averaged.")}
    rest, lines = _fitting(rest, own, state.parameters.views, path)
    averaged = read.get("averaged.safetensors", {})
    return WeightCopies(read["model.safetensors"], averaged, rest), lines


class ParsedCheckpoint(NamedTuple):
    """A checkpoint read and compared with a state: loading can no longer fail half-way."""

    weights: WeightCopies
    optimizer: list[list[LoadableOptimizer]]  # of each phase
    record: dict[str, Any]
    lines: list[str]  # for the user
    shared: shared_values.SavedShared = shared_values.NONE
    file: Path | None = None  # file with the optimizer's values that are on "meta" here
    callbacks: dict[str, dict[str, Any]] | None = None


def loadable(path: Path, record: dict[str, Any], state: State) -> ParsedCheckpoint:
    """Read a sound checkpoint, and compare all of it with a state. Nothing is changed.

    Raises:
        MisfitError: a tensor is missing, is not the model's, or has another shape or dtype.
        CheckpointError: values are missing, because the checkpoint was saved with other settings.
    """
    # 1. Compare the record and the headers first, before reading data of the size of a model.
    optimizer = state.phases.kind
    if record["optimizer"] != optimizer:
        raise MisfitError(
            path,
            f"it was trained with {printable(record['optimizer'])}, and this run has {optimizer}",
            fix="use the same optimizer, or choose another run_dir",
        )
    if state.average is not None and "averaged.safetensors" not in record["files"]:
        raise CheckpointError(
            path,
            "it has no averaged parameters, and ema_decay is set",
            fix="leave it out, or choose another run_dir",
        )
    # 2. The tensors.
    saved, lines = weights_in(path, record, state)
    if (amendments := record.get("amendments")) is not None:
        try:
            state.model_edits.require_fitting(amendments)
        except CheckpointError as error:
            raise MisfitError(path, error) from error
    beside, more = shared_values.read(path, record)
    # Owners read the large ones.
    large = [each.is_by_element for each in state.phases.spread if each.is_large]
    moments = tensors(path, record, OPTIMIZER, lambda key: any(is_left(key) for is_left in large))
    return ParsedCheckpoint(
        saved,
        state.phases.loadable(moments, record, path),
        record,
        [*lines, *more],
        beside,
        path / OPTIMIZER,
        _callbacks(path, record),
    )


@torch.no_grad()
def load(saved: ParsedCheckpoint, state: State) -> None:
    """Bring a state to a checkpoint."""
    take_weights(saved.weights, state)
    state.phases.load(saved.optimizer)
    if saved.file is not None:
        for optimizer in state.phases.spread:
            optimizer.leave_unread(saved.file)
    if (amendments := saved.record.get("amendments")) is not None:
        state.model_edits.load(amendments)
    saved.shared.load()
    state.load_account(saved.record["account"])
    state.callbacks = state.callbacks_saved = saved.callbacks or {}
    state.global_step = saved.record["global_step"]


def _callbacks(path: Path, record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the states of callbacks in a checkpoint.

    Raises:
        CheckpointError: a saved state is no dict.
    """
    decoder = TreeDecoder(tensors(path, record, CALLBACKS), {})
    found = {name: decoder.decode(tree) for name, tree in record.get("callbacks", {}).items()}
    if odd := next((name for name, value in found.items() if not isinstance(value, dict)), None):
        raise CheckpointError(path, f"the saved state of callback {printable(odd)} is not a dict")
    return found


def _rest(state: State) -> dict[str, torch.Tensor]:
    """Return the tensors left out by state dicts, plain and averaged."""
    left_out = state.rest()
    if state.optimizer.has_modes:  # the model's file has the parameters for evaluation
        left_out |= state.parameters.views
    rest = {f"model.{name}": tensor for name, tensor in left_out.items()}
    if state.average is not None:
        left_out = state.rest(state.average.shadow)
        rest |= {f"averaged.{name}": tensor for name, tensor in left_out.items()}
    return rest


def _fitting(
    values: dict[str, torch.Tensor],
    targets: dict[str, torch.Tensor],
    trained: Collection[str],
    path: Path,
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return the values that fit the targets, and lines on all further values.

    Raises:
        MisfitError: a trained parameter is missing, or has another shape or dtype.
    """
    fitting, lines = {}, []
    for name, value in values.items():
        target = targets.get(name)
        if target is not None and (target.shape, target.dtype) == (value.shape, value.dtype):
            fitting[name] = value
        else:
            now = "no such tensor" if target is None else str(tuple(target.shape))
            lines.append(
                f"{printable(name)}: the checkpoint has {tuple(value.shape)}, the model {now}; the "
                "saved values are dropped"
            )
    for name in targets.keys() - fitting.keys():
        if name.startswith("averaged.") or name.removeprefix("model.") in trained:
            raise MisfitError(path, f"{printable(name)} is in none of its files")
    return fitting, lines


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
                path,
                f"{printable(name)}: the checkpoint has {there}, the model {here}",
                fix="train the model that was saved, or choose another run_dir",
            )


def _copied(
    part: dict[str, torch.Tensor], memory: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    # One contiguous copy per tensor, as safetensors requires: the views share a vector.
    copies = {}
    for name, tensor in part.items():
        copy = memory.get(name)
        if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
            copy = torch.empty(tensor.shape, dtype=tensor.dtype)
        copies[name] = copy.copy_(tensor.detach())
    return copies
