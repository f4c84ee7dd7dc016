"""Checkpoints on disk: tensors and a record, whole or not at all.

    RUN_DIR/checkpoints/step-000000001234/
        model.safetensors       parameters and buffers under the user's names
        averaged.safetensors    the same with the averaged parameters, if there are any
        rest.safetensors        parameters and buffers that the model's state dict leaves out
        optimizer.safetensors   per-parameter optimizer state: "exp_avg.conv1.weight", ...
        state.json              the rest, and the SHA-256 of each file
        complete                the SHA-256 of state.json; written last

A checkpoint is written into a temporary directory, flushed to the disk, and renamed; then it gets
its marker. Reading checks every byte. Nothing is pickled.

What the tensors are to a training is in ``quorate.training.saved_state``. Checking, listing and
digests need no torch, whose import takes longer than they do.
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
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from safetensors import SafetensorError, deserialize

from quorate.errors import CheckpointError
from quorate.machine.atomic_file import flush_folder, write_atomically
from quorate.replica.digest import TensorBytes, digest_of_bytes

if TYPE_CHECKING:
    import torch

FORMAT = 2
TEMPORARY = ".saving-"
RECORD, MARKER = "state.json", "complete"

# From safetensors' names of dtypes to torch's.
TORCH_NAMES = {
    **{"BOOL": "bool", "U8": "uint8", "U16": "uint16", "U32": "uint32", "U64": "uint64"},
    **{"I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64", "C64": "complex64"},
    **{"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"},
    **{"F8_E4M3": "float8_e4m3fn", "F8_E4M3FNUZ": "float8_e4m3fnuz"},
    **{"F8_E5M2": "float8_e5m2", "F8_E5M2FNUZ": "float8_e5m2fnuz"},
}


class Contents(NamedTuple):
    """What goes into a checkpoint: a state after some update, in memory of its own."""

    files: dict[str, dict[str, torch.Tensor]]  # by file, tensors under the user's names
    record: dict[str, Any]  # state.json but for the checksums

    @property
    def global_step(self) -> int:
        """Updates applied to the state."""
        step: int = self.record["global_step"]
        return step

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for part in self.files.values() for t in part.values())


class Sound(NamedTuple):
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


def checkpoint_of(run_dir: Path, global_step: int) -> Path:
    """Return the directory that the checkpoint of a step has, if there is one."""
    return run_dir / "checkpoints" / f"step-{global_step:012d}"


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
        reason = f"{error.strerror or error}, in a checkpoint of {saved.nbytes:,} bytes"
        raise OSError(error.errno, reason, str(error.filename or folder)) from error


def _write(folder: Path, saved: Contents) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    _clear(folder)  # what a kill in an earlier save left
    final = checkpoint_of(folder.parent, saved.global_step)
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
    _clear(folder)
    return final


def _clear(folder: Path) -> None:
    """Delete temporary directories."""
    for temporary in folder.glob(f"{TEMPORARY}*"):
        shutil.rmtree(temporary, ignore_errors=True)


def remove(path: Path) -> None:
    """Delete a checkpoint. A kill in between leaves none that looks like one."""
    with suppress(OSError):
        temporary = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=path.parent))
        path.rename(temporary / "removed")
        shutil.rmtree(temporary)


def find(run_dir: Path) -> Sound | None:
    """Return the newest checkpoint that is sound; None if there is none at all.

    Raises:
        CheckpointError: there are checkpoints, and each is damaged; it says what is wrong.
    """
    wrong: list[str] = []
    for path, step in newest_first(run_dir):
        try:
            return Sound(path, check(path, step), wrong)
        except CheckpointError as error:
            wrong.append(str(error))
    if wrong:
        raise CheckpointError(
            f"no sound checkpoint in {run_dir}: {'; '.join(wrong)}; begin anew with --fresh, which "
            "moves all this aside"
        )
    return None


def listing(run_dir: Path) -> list[Listed]:
    """Check all checkpoints of a run, and list them, the newest first."""
    listed = []
    for path, step in newest_first(run_dir):
        wrong = saved_at = None
        try:
            saved_at = check(path, step)["saved_at"]
        except CheckpointError as error:
            wrong = str(error)
        nbytes = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
        listed.append(Listed(path, step, nbytes, saved_at, wrong))
    return listed


def record_of(path: Path) -> dict[str, Any]:
    """Read the record of a checkpoint that is sound."""
    record: dict[str, Any] = json.loads((path / RECORD).read_bytes())
    return record


def tensors(path: Path, name: str) -> dict[str, torch.Tensor]:
    """Read the tensors in a file of a checkpoint that is sound."""
    from safetensors.torch import load

    return load((path / name).read_bytes())


def digest_of(path: Path, name: str, order: Iterable[str]) -> str:
    """Return the digest of the tensors in a file, without torch.

    It is ``quorate.replica.digest.digest`` of the same tensors: equal digests, equal bits.

    Args:
        order: their names, as the checkpoint's record has them under "order".
    """
    data = (path / name).read_bytes()
    parts = dict(deserialize(data))  # type: ignore[no-untyped-call]
    return digest_of_bytes(
        TensorBytes(
            tensor,
            parts[tensor]["shape"],
            f"torch.{TORCH_NAMES[parts[tensor]['dtype']]}",
            parts[tensor]["data"],
        )
        for tensor in order
    )


def newest_first(run_dir: Path) -> list[tuple[Path, int]]:
    """List the directories of checkpoints, sound or not, with the steps that their names say."""
    paths = (run_dir / "checkpoints").glob("step-*")
    steps = [(p, int(p.name[5:])) for p in paths if p.name[5:].isdecimal() and p.is_dir()]
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
    if (marker := _marker(text)) != (expected := (path / MARKER).read_bytes()):
        raise CheckpointError(
            f"{path / RECORD}: got SHA-256 {marker!r}, expected {expected!r} as {MARKER!r} says"
        )
    record: dict[str, Any] = json.loads(text)  # as it was written
    if (format_ := record.get("format")) != FORMAT:
        raise CheckpointError(f"{path / RECORD}: got format {format_}, expected {FORMAT}")
    if record["global_step"] != step:
        raise CheckpointError(
            f"{path}: it holds step {record['global_step']}, and its name says {step}"
        )
    for name, sha256 in record["files"].items():
        if (got := _sha256(path / name)) != sha256:
            raise CheckpointError(f"{path / name}: got SHA-256 {got}, expected {sha256}")
    return record


def _write_tensors(path: Path, part: dict[str, torch.Tensor]) -> str:
    from safetensors.torch import save_file

    try:
        save_file(part, path)
    except SafetensorError as error:  # it has the system's error in its text alone
        number = re.search(r"os error (\d+)", str(error))
        code = int(number[1]) if number else errno.EIO
        reason = os.strerror(code) if number else str(error)
        raise OSError(code, reason, str(path)) from error
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return _sha256(path)


def _marker(record: bytes) -> bytes:
    return f"{hashlib.sha256(record).hexdigest()}\n".encode()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
