"""Checkpoints: a state on disk, whole or not at all.

    RUN_DIR/checkpoints/step-000000001234/
        model.safetensors       parameters and buffers under the user's names
        averaged.safetensors    the same with the averaged parameters, if there are any
        optimizer.safetensors   per-parameter optimizer state: "exp_avg.conv1.weight", ...
        state.json              the rest, and the SHA-256 of each file

A checkpoint is written into a temporary directory, flushed to the disk, and renamed. Loading checks
every file against its SHA-256. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from quorate.digest import digest
from quorate.errors import CheckpointError
from quorate.state import State

FORMAT = 1
KEPT = 5  # the newest so many checkpoints stay
TEMPORARY = ".saving-"


class Found(NamedTuple):
    """The newest sound checkpoint of a run."""

    path: Path
    record: dict[str, Any]  # its state.json
    passed_over: list[str]  # what is wrong with newer ones


def save(run_dir: Path, state: State, facts: dict[str, Any]) -> Path:
    """Write a checkpoint and return its directory.

    Args:
        facts: what goes into state.json beside the state's own: shards, seed, devices, ...

    Raises:
        OSError: the disk is full, or the directory cannot be written to.
    """
    folder = run_dir / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    model = state.tensors()
    files = {"model.safetensors": model}
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

    final = folder / f"step-{state.global_step:012d}"
    temporary = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=folder))
    try:
        sums = {name: _write(temporary / name, _encode(part)) for name, part in files.items()}
        record = {
            "format": FORMAT,
            "global_step": state.global_step,
            **facts,
            "digest": digest(model.items()),
            "order": list(model),
            "optimizer": type(state.optimizer.inner).__name__,
            "optimizer_numbers": numbers,
            "torch": torch.__version__,
            "files": sums,
        }
        _write(temporary / "state.json", (json.dumps(record, indent=1) + "\n").encode())
        _flush(temporary)
        if final.exists():  # damaged, or of a run that was passed over: out of the way as a whole
            final.rename(Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=folder)) / "replaced")
        temporary.rename(final)
        _flush(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    # What a kill left of earlier saves, and what is older than the newest few.
    # Newer steps are damaged ones that were passed over: the run will come by and replace them.
    stale = [path for path, step in _newest_first(run_dir) if step <= state.global_step][KEPT:]
    for old in (*folder.glob(f"{TEMPORARY}*"), *stale):
        shutil.rmtree(old, ignore_errors=True)
    return final


def find(run_dir: Path) -> Found | None:
    """The newest checkpoint whose files are all sound; None if there is none at all.

    Raises:
        CheckpointError: there are checkpoints, and each is damaged; it says what is wrong.
    """
    wrong: list[str] = []
    for path, step in _newest_first(run_dir):
        try:
            return Found(path, _check(path, step), wrong)
        except (CheckpointError, OSError) as error:
            wrong.append(str(error))
    if wrong:
        raise CheckpointError(f"no sound checkpoint in {run_dir}: {'; '.join(wrong)}")
    return None


def tensors(path: Path, name: str) -> dict[str, torch.Tensor]:
    """The tensors of one file of a checkpoint."""
    return load_tensors((path / name).read_bytes())


def load(path: Path, record: dict[str, Any], state: State) -> None:
    """Bring a state to a checkpoint that ``find`` gave.

    Raises:
        CheckpointError: a tensor is missing, is not the model's, or has another shape.
    """
    here = type(state.optimizer.inner).__name__
    if record["optimizer"] != here:
        raise CheckpointError(
            f"{path}: it was trained with {record['optimizer']}, and this run has {here}; use the "
            "same optimizer, or choose another run_dir"
        )
    model = tensors(path, "model.safetensors")
    _put(state.tensors(), model, path)
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
    state.go_to(record["global_step"])


def _put(targets: dict[str, torch.Tensor], values: dict[str, torch.Tensor], path: Path) -> None:
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


def _newest_first(run_dir: Path) -> Iterator[tuple[Path, int]]:
    found = (run_dir / "checkpoints").glob("step-*")
    steps = [(p, int(p.name[5:])) for p in found if p.name[5:].isdigit()]
    return iter(sorted(steps, key=lambda item: -item[1]))


def _check(path: Path, step: int) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads((path / "state.json").read_text())
        sums, found = record["files"], record["global_step"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}/state.json: {type(error).__name__}: {error}") from error
    if record.get("format") != FORMAT or found != step:
        raise CheckpointError(
            f"{path}/state.json: got format {record.get('format')} and step {found}, "
            f"expected {FORMAT} and {step}"
        )
    for name, expected in sums.items():
        got = hashlib.sha256((path / name).read_bytes()).hexdigest()
        if got != expected:
            raise CheckpointError(f"{path / name}: got SHA-256 {got}, expected {expected}")
    return record


def _encode(part: dict[str, torch.Tensor]) -> bytes:
    # The views share their vector's memory, which safetensors refuses: each is saved by itself.
    own = {
        name: t.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, t in part.items()
    }
    return save_tensors(own)


def _write(path: Path, data: bytes) -> str:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return hashlib.sha256(data).hexdigest()


def _flush(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
