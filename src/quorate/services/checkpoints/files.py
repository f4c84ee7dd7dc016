"""Checkpoints: a state on disk, whole or not at all.

    RUN_DIR/checkpoints/step-000000001234/
        model.safetensors       parameters and buffers under the user's names
        averaged.safetensors    the same with the averaged parameters, if there are any
        optimizer.safetensors   per-parameter optimizer state: "exp_avg.conv1.weight", ...
        state.json              the rest, and the SHA-256 of each file
        complete                the SHA-256 of state.json; written last

A checkpoint is written into a temporary directory, flushed to the disk, and renamed; then it gets
its marker. Loading checks every byte. Nothing is pickled.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save_file

from quorate.errors import CheckpointError
from quorate.machine.atomic_file import flush_folder, write_atomically
from quorate.training.state import State

FORMAT = 2
TEMPORARY = ".saving-"
RECORD, MARKER = "state.json", "complete"


class Contents(NamedTuple):
    """What goes into a checkpoint: a state after some update, in memory of its own."""

    files: dict[str, dict[str, torch.Tensor]]  # by file, tensors under the user's names
    record: dict[str, Any]  # state.json but for the checksums

    @property
    def global_step(self) -> int:
        step: int = self.record["global_step"]
        return step

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(t.nbytes for part in self.files.values() for t in part.values())


class Found(NamedTuple):
    """A checkpoint that is sound."""

    path: Path
    record: dict[str, Any]  # its state.json
    passed_over: list[str]  # what is wrong with newer ones


class Listed(NamedTuple):
    """A directory that is a checkpoint, or should be one."""

    path: Path
    global_step: int
    nbytes: int
    saved_at: float | None  # seconds since the epoch; None: nobody can tell
    wrong: str | None  # None: it is sound


def contents(state: State, facts: dict[str, Any], over: Contents | None = None) -> Contents:
    """Copy a state, between two updates.

    Args:
        facts: what goes into state.json beside the state's own: shards, seed, devices, ...
        over: an earlier copy that nobody reads any more. Its memory is used again: pages that the
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
        "format": FORMAT,
        "global_step": state.global_step,
        **facts,
        "order": list(files["model.safetensors"]),
        "optimizer": type(state.optimizer.inner).__name__,
        "optimizer_numbers": numbers,
    }
    room = {} if over is None else over.files
    return Contents(
        {name: _copied(part, room.get(name, {})) for name, part in files.items()}, record
    )


def write(run_dir: Path, saved: Contents) -> Path:
    """Write a checkpoint and return its directory. Blocks until it is on the disk.

    Raises:
        OSError: the disk is full, or the directory cannot be written to. It names the path and
            the bytes; the older checkpoints are as they were.
    """
    folder = run_dir / "checkpoints"
    try:
        return _write(folder, saved)
    except OSError as error:
        said = f"{error.strerror or error}, in a checkpoint of {saved.nbytes:,} bytes"
        raise OSError(error.errno, said, str(error.filename or folder)) from error


def _write(folder: Path, saved: Contents) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(f"{TEMPORARY}*"):  # by a kill in an earlier save
        shutil.rmtree(left, ignore_errors=True)
    final = folder / f"step-{saved.global_step:012d}"
    temporary = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=folder))
    try:
        # 1. The files, and a record that has their checksums.
        sums = {}
        for name, part in saved.files.items():
            sums[name] = _write_tensors(temporary / name, part)
        record = {**saved.record, "saved_at": time.time(), "files": sums}
        text = (json.dumps(record, indent=1) + "\n").encode()
        write_atomically(temporary / RECORD, text)
        # 2. In its place, as a whole.
        if final.exists():  # damaged, or of a run that was passed over: out of the way as a whole
            final.rename(Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=folder)) / "replaced")
        temporary.rename(final)
        flush_folder(folder)
        # 3. The marker, which has the record's checksum: without it there is no checkpoint.
        write_atomically(final / MARKER, _marker(text))
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        if final.exists() and not (final / MARKER).exists():
            shutil.rmtree(final, ignore_errors=True)
        raise
    for left in folder.glob(f"{TEMPORARY}*"):
        shutil.rmtree(left, ignore_errors=True)
    return final


def remove(path: Path) -> None:
    """Delete a checkpoint. A kill in between leaves none that looks like one."""
    with suppress(OSError):
        gone = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=path.parent))
        path.rename(gone / "removed")
        shutil.rmtree(gone)


def find(run_dir: Path) -> Found | None:
    """The newest checkpoint that is sound; None if there is none at all.

    Raises:
        CheckpointError: there are checkpoints, and each is damaged; it says what is wrong.
    """
    wrong: list[str] = []
    for path, step in newest_first(run_dir):
        try:
            return Found(path, check(path, step), wrong)
        except CheckpointError as error:
            wrong.append(str(error))
    if wrong:
        raise CheckpointError(
            f"no sound checkpoint in {run_dir}: {'; '.join(wrong)}; begin anew with --fresh, which "
            "moves all this aside"
        )
    return None


def listing(run_dir: Path) -> list[Listed]:
    """All checkpoints of a run, the newest first, each checked."""
    found = []
    for path, step in newest_first(run_dir):
        wrong = saved_at = None
        try:
            saved_at = check(path, step)["saved_at"]
        except CheckpointError as error:
            wrong = str(error)
        nbytes = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
        found.append(Listed(path, step, nbytes, saved_at, wrong))
    return found


def record_of(path: Path) -> dict[str, Any]:
    """The record of a checkpoint that is sound."""
    record: dict[str, Any] = json.loads((path / RECORD).read_bytes())
    return record


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


def newest_first(run_dir: Path) -> list[tuple[Path, int]]:
    """The directories of checkpoints, sound or not, and the steps that their names say."""
    found = (run_dir / "checkpoints").glob("step-*")
    steps = [(p, int(p.name[5:])) for p in found if p.name[5:].isdecimal() and p.is_dir()]
    return sorted(steps, key=lambda item: -item[1])


def check(path: Path, step: int) -> dict[str, Any]:
    """Read every byte of a checkpoint, and return its record.

    Raises:
        CheckpointError: something is missing, is not what was written, or is of another step.
    """
    try:
        return _check(path, step)
    except OSError as error:
        raise CheckpointError(f"{error.filename or path}: {error.strerror or error}") from error


def _check(path: Path, step: int) -> dict[str, Any]:
    if not (path / MARKER).exists():
        raise CheckpointError(f"{path}: no file {MARKER!r}: it was cut off while it was saved")
    text = (path / RECORD).read_bytes()
    if (got := _marker(text)) != (expected := (path / MARKER).read_bytes()):
        raise CheckpointError(
            f"{path / RECORD}: got SHA-256 {got!r}, expected {expected!r} as {MARKER!r} says"
        )
    record: dict[str, Any] = json.loads(text)  # as it was written
    if (format_ := record.get("format")) != FORMAT:
        raise CheckpointError(f"{path / RECORD}: got format {format_}, expected {FORMAT}")
    if record["global_step"] != step:
        raise CheckpointError(
            f"{path}: it holds step {record['global_step']}, and its name says {step}"
        )
    for name, sha256 in record["files"].items():
        if (found := _sha256(path / name)) != sha256:
            raise CheckpointError(f"{path / name}: got SHA-256 {found}, expected {sha256}")
    return record


def _copied(
    part: dict[str, torch.Tensor], room: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    # Each by itself and contiguous, as safetensors wants them: the views share their vector.
    found = {}
    for name, tensor in part.items():
        copy = room.get(name)
        if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
            copy = torch.empty(tensor.shape, dtype=tensor.dtype)
        found[name] = copy.copy_(tensor.detach())
    return found


def _write_tensors(path: Path, part: dict[str, torch.Tensor]) -> str:
    try:
        save_file(part, path)
    except SafetensorError as error:  # it has the system's error in its text alone
        found = re.search(r"os error (\d+)", str(error))
        number = int(found[1]) if found else errno.EIO
        said = os.strerror(number) if found else str(error)
        raise OSError(number, said, str(path)) from error
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return _sha256(path)


def _marker(record: bytes) -> bytes:
    return f"{hashlib.sha256(record).hexdigest()}\n".encode()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
