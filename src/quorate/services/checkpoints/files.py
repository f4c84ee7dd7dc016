"""Checkpoints on disk: tensors and a record, complete or not at all.

    RUN_DIR/checkpoints/step-000000001234/
        model.safetensors       parameters and buffers under the user's names
        averaged.safetensors    the same with the averaged parameters, if there are any
        rest.safetensors        parameters and buffers missing from the model's state dict
        shared.safetensors      tensors of ``Shared``, if there are any
        optimizer.safetensors   per-parameter optimizer state: "exp_avg.conv1.weight", ...
        callbacks.safetensors   tensors of callbacks, if there are any
        state.json              everything else, and the SHA-256 of each file
        complete                the SHA-256 of state.json; written last

A checkpoint is written into a temporary directory, gets its marker, is flushed to disk, and is
renamed. An older checkpoint of the same step is renamed to ".replaced-step-..." for the
duration: after a kill between the two renames, the replaced checkpoint is read instead. Nothing is
pickled. Reading verifies every byte, and does not trust content merely because its checksum
matches: the record is compared with its schema (``record``), tensor files with their headers
(``tensor_file``), and both with each other. Each tensor file has the checksum of the record in its
header, so that files of two checkpoints cannot be mixed up.

This module reads checkpoints; ``draft`` writes them. ``training/saved_state.py`` maps the tensors
to the state of a training. Importing this module does not import torch.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from quorate.errors import CheckpointError, MisfitError
from quorate.machine.atomic_file import flush_folder
from quorate.machine.regular_file import open_regular, read_regular
from quorate.machine.resources import too_large
from quorate.replica.digest import TensorBytes, digest_of_bytes
from quorate.services.checkpoints import record as records
from quorate.services.checkpoints import tensor_file
from quorate.services.run_directory.contents import require_seen

if TYPE_CHECKING:
    import torch

TEMPORARY = ".saving-"
REPLACED = ".replaced-"  # prefix of the name of a checkpoint while a new checkpoint replaces it
RECORD, MARKER = "state.json", "complete"
# Key in the header of each tensor file: the checksum of the record saved together with the file.
RECORD_SHA256 = "record_sha256"


class ValidCheckpoint(NamedTuple):
    """A sound checkpoint, found by ``find``."""

    path: Path
    record: dict[str, Any]  # the content of its state.json
    passed_over: list[str]  # the faults of newer checkpoints, one text each


class Listed(NamedTuple):
    """A directory in ``checkpoints/`` with the name of a checkpoint, sound or not."""

    path: Path
    global_step: int
    nbytes: int
    saved_at: float | None  # seconds since the epoch; None: unknown, the checkpoint is damaged
    wrong: str | None  # the fault; None: the checkpoint is sound


def checkpoint_of(run_dir: Path, global_step: int) -> Path:
    """Return the directory of the checkpoint of a step, whether or not the directory exists."""
    return run_dir / "checkpoints" / f"step-{global_step:012d}"


def replaced_by(path: Path) -> Path:
    """Return the path of a checkpoint while a new checkpoint of the same step replaces it."""
    return path.with_name(f"{REPLACED}{path.name}")


def clear_up(run_dir: Path) -> None:
    """Remove the leftovers of killed saves, and restore the checkpoints that were being replaced.

    The caller holds the run's lock, and no save is in progress. A replaced checkpoint gets its name
    back if the name is free, is deleted if the checkpoint under the name is sound, and is left
    alone otherwise.
    """
    folder = run_dir / "checkpoints"
    for replaced, step in _with_steps(folder.glob(f"{REPLACED}step-*")):
        final = checkpoint_of(run_dir, step)
        if replaced != replaced_by(final):
            continue  # not a name that quorate writes: another program's file
        with suppress(OSError, CheckpointError):
            if os.path.lexists(final):
                _check_at(final, step)
                remove(replaced)
            else:
                replaced.rename(final)
                flush_folder(folder)
    for temporary in folder.glob(f"{TEMPORARY}*"):
        shutil.rmtree(temporary, ignore_errors=True)


def remove(path: Path) -> None:
    """Delete a checkpoint. A kill during the deletion leaves no directory that looks like one."""
    with suppress(OSError):
        temporary = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=path.parent))
        path.rename(temporary / "removed")
        shutil.rmtree(temporary)


def find(
    run_dir: Path, fits: Callable[[Path, dict[str, Any]], None] | None = None
) -> ValidCheckpoint | None:
    """Return the newest sound checkpoint; None if there is no checkpoint.

    Args:
        fits: called with the directory and record of a sound checkpoint; raises ``MisfitError`` if
            the checkpoint belongs to another run. Such a checkpoint is skipped if an older one
            fits.

    Raises:
        CheckpointError: there are checkpoints, and all are damaged; the error lists the faults. Or
            no sound checkpoint fits; the error is the ``MisfitError`` of the newest.
    """
    wrong: list[str] = []
    misfit: MisfitError | None = None
    for path, step in newest_first(run_dir):
        try:
            record = _check_at(path, step)
        except CheckpointError as error:
            if os.path.lexists(path):  # else the run deleted the checkpoint meanwhile
                wrong.append(str(error))
            continue
        try:
            if fits is not None:
                fits(path, record)
        except MisfitError as error:
            misfit = misfit or error
            wrong.append(str(error))
            continue
        return ValidCheckpoint(path, record, wrong)
    if misfit is not None:
        raise misfit
    if wrong:
        raise CheckpointError(
            f"no sound checkpoint in {run_dir}",
            "; ".join(wrong),
            fix="start again with --fresh, which moves all of this aside",
        )
    return None


def listing(run_dir: Path) -> list[Listed]:
    """Verify all checkpoints of a run and list them, newest first.

    The run may continue meanwhile: a checkpoint deleted by the run is not listed.
    """
    listed: list[Listed] = []
    for path, step in newest_first(run_dir):
        wrong = saved_at = None
        try:
            saved_at = _check_at(path, step)["saved_at"]
        except CheckpointError as error:
            wrong = str(error)
        if listed and listed[-1].global_step == step and listed[-1].wrong is None:
            continue  # a leftover: a sound checkpoint of the same step is already listed
        if os.path.lexists(path):
            listed.append(Listed(path, step, _nbytes(path), saved_at, wrong))
    return listed


def _nbytes(path: Path) -> int:
    """Return the size of a checkpoint's files in bytes, as far as the files are readable."""
    with suppress(OSError):
        return sum(file.stat().st_size for file in path.iterdir() if file.is_file())
    return 0


def record_of(path: Path) -> dict[str, Any]:
    """Read the record of a checkpoint that was verified before.

    Raises:
        CheckpointError: the checkpoint was damaged since.
    """
    with readable(path / RECORD):
        return records.parsed(read_regular(path / RECORD, records.MOST_BYTES))


def tensors(
    path: Path,
    record: Mapping[str, Any],
    name: str,
    elsewhere: Callable[[str], bool] = lambda _: False,
) -> dict[str, torch.Tensor]:
    """Read the tensors in a file of a checkpoint that was verified before; none without the file.

    Args:
        record: the record of the checkpoint.
        elsewhere: returns True for the name of a tensor whose values another process reads: the
            returned tensor is on "meta".

    Raises:
        CheckpointError: the checkpoint was damaged since, or the tensors do not fit into memory.
    """
    import torch

    from quorate.services.checkpoints.tensor_bytes import read_at

    file, read = path / name, dict[str, torch.Tensor]()
    if name not in record["files"]:
        return read
    with readable(file):
        stored = tensor_file.header(file).tensors
        here = {tensor for tensor in stored if not elsewhere(tensor)}
        if reason := too_large(sum(stored[t].stop - stored[t].start for t in here)):
            raise CheckpointError(file, f"reading it takes {reason}")
        with open_regular(file) as opened:
            for tensor, (dtype, shape, start, _) in stored.items():
                device = "cpu" if tensor in here else "meta"
                read[tensor] = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
                if tensor in here:
                    read_at(opened.fileno(), read[tensor], start)
    return read


def digest_of(path: Path, name: str, order: Iterable[str]) -> str:
    """Return the digest of the tensors in a file, without importing torch.

    Equals ``quorate.replica.digest.digest`` of the same tensors: equal digests mean equal bits.
    Memory use does not depend on the size of the tensors.

    Args:
        order: the names of the tensors, as in the entry "order" of the checkpoint's record.

    Raises:
        CheckpointError: the checkpoint was damaged since its verification.
    """
    file = path / name
    with readable(file):
        stored = tensor_file.header(file).tensors
        return digest_of_bytes(
            TensorBytes(
                tensor,
                stored[tensor].shape,
                f"torch.{stored[tensor].dtype}",
                tensor_file.pieces(file, stored[tensor]),
            )
            for tensor in order
        )


def newest_first(run_dir: Path) -> list[tuple[Path, int]]:
    """List all paths with the name of a checkpoint, sound or not, with the steps in the names.

    A checkpoint whose replacement was interrupted comes after the checkpoint that has its name, if
    any.

    Raises:
        SettingError: the directory cannot be read.
    """
    require_seen(run_dir)
    folder = run_dir / "checkpoints"
    # No check of the kind of a path: a dangling link is an unreadable checkpoint, not a missing
    # one.
    paths = [*folder.glob("step-*"), *folder.glob(f"{REPLACED}step-*")]
    return sorted(_with_steps(paths), key=lambda item: -item[1])


def _with_steps(paths: Iterable[Path]) -> list[tuple[Path, int]]:
    """Return the paths whose names contain a step, with the steps."""
    digits = [(path, path.name.removeprefix(REPLACED).removeprefix("step-")) for path in paths]
    return [(path, int(step)) for path, step in digits if step.isdecimal()]


def is_ours(path: Path, step: int) -> bool:
    """Return whether a directory has exactly the name of the checkpoint of a step.

    Any other spelling, such as "step-7" or digits of another script, is another program's
    directory.
    """
    return path.name == checkpoint_of(path.parent.parent, step).name


def check(path: Path, step: int | None) -> dict[str, Any]:
    """Read and verify every byte of a checkpoint, and return its record.

    Args:
        step: the step in the directory's name; None: the name contains no step.

    Raises:
        CheckpointError: a file is missing, differs from its checksum, belongs to another step, or
            contradicts the other files.
    """
    with readable(path):
        return _check(path, step)


def _check_at(path: Path, step: int) -> dict[str, Any]:
    if path.is_symlink() and not path.exists():
        raise CheckpointError(path, "a link that leads nowhere: is a disk not mounted?")
    if not is_ours(path.with_name(path.name.removeprefix(REPLACED)), step):
        expected = checkpoint_of(path.parent.parent, step).name
        raise CheckpointError(path.parent, got=f"{path.name!r}", expected=f"the name {expected!r}")
    with readable(path):  # not a link to a missing target, for example
        if not stat.S_ISDIR(path.stat().st_mode):
            raise CheckpointError(path, "not a directory")
    return check(path, step)


def check_named(path: Path) -> dict[str, Any]:
    """Verify a checkpoint in a directory of any name.

    A user may have copied and renamed the directory. A step in the name is compared with the
    record.

    Raises:
        CheckpointError: see ``check``.
    """
    name = path.resolve().name
    if name.startswith("step-") and name[5:].isascii() and name[5:].isdecimal():
        return check(path, int(name[5:]))
    return check(path, None)


def _check(path: Path, step: int | None) -> dict[str, Any]:
    # 1. Verify the record: first its checksum, then its content.
    try:
        expected = read_regular(path / MARKER, len(marker(b"")))
    except FileNotFoundError:
        raise CheckpointError(
            path,
            f"no file {MARKER!r}: it was cut off while it was saved",
        ) from None
    text = read_regular(path / RECORD, records.MOST_BYTES)
    if (found := marker(text)) != expected:
        raise CheckpointError(
            path / RECORD,
            got=f"SHA-256 {found!r}",
            expected=f"{expected!r} as {MARKER!r} says",
        )
    with readable(path / RECORD):
        record = records.parsed(text)
    if step is not None and record["global_step"] != step:
        raise CheckpointError(
            path,
            f"it holds step {record['global_step']}, and its name says {step}",
        )
    # 2. Verify the tensor files: first the headers, whose sizes bound the amount to read; then each
    # byte.
    body = records.body_sha256(record)
    for name, sha256 in record["files"].items():
        header = tensor_file.header(path / name)
        if (got := tensor_file.sha256(path / name)) != sha256:
            raise CheckpointError(path / name, got=f"SHA-256 {got}", expected=sha256)
        if (bound := header.metadata.get(RECORD_SHA256, body)) != body:  # none in old files
            raise CheckpointError(
                path / name,
                f"it was saved with a record of SHA-256 {records.abridged(bound)}, and this one "
                f"has {body}",
            )
        if wrong := records.contradicts(record, name, header.tensors):
            raise CheckpointError(path / name, wrong)
    return record


def marker(record: bytes) -> bytes:
    """Return the content of the marker file for a record."""
    return f"{hashlib.sha256(record).hexdigest()}\n".encode()


@contextmanager
def readable(path: Path, fix: str = "") -> Iterator[None]:
    """Replace an error of a reader in the block by an error of one line.

    Args:
        path: of the file, if the error names none.
        fix: the cure, for the error.

    Raises:
        CheckpointError: the block raised OSError, EOFError or ValueError.
    """
    try:
        yield
    except (OSError, EOFError, ValueError) as error:
        where = getattr(error, "filename", None) or path
        why = getattr(error, "strerror", None) or error
        raise CheckpointError(where, why, fix=fix) from error
