"""Checkpoints on disk: tensors and a record, whole or not at all.

    RUN_DIR/checkpoints/step-000000001234/
        model.safetensors       parameters and buffers under the user's names
        averaged.safetensors    the same with the averaged parameters, if there are any
        rest.safetensors        parameters and buffers that the model's state dict leaves out
        shared.safetensors      tensors of ``Shared``, if there are any
        optimizer.safetensors   per-parameter optimizer state: "exp_avg.conv1.weight", ...
        callbacks.safetensors   tensors that callbacks keep, if there are any
        state.json              the rest, and the SHA-256 of each file
        complete                the SHA-256 of state.json; written last

A checkpoint is written into a temporary directory, gets its marker, is flushed to the disk, and is
renamed. One of the same step is ".replaced-step-..." until then: a kill between the two renames
leaves that one, which is read in its place. Nothing is pickled. Reading checks every byte, and
believes nothing of what checksums cover either: the record is compared with its schema
(``record``), tensor files with their headers (``tensor_file``), and both with each other. Each
tensor file has the checksum of the record in its header, so that files of two checkpoints are not
taken for one.

Here they are read: ``draft`` writes them. What the tensors are to a training is in
``training/saved_state.py``. Nothing here needs torch.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from quorate.errors import CheckpointError, MisfitError
from quorate.machine.atomic_file import flush_folder
from quorate.machine.regular_file import open_regular, read_regular
from quorate.machine.resources import too_large
from quorate.replica.digest import TensorBytes, digest_of_bytes
from quorate.services.checkpoints import record as records
from quorate.services.checkpoints import tensor_file
from quorate.services.run_contents import require_seen

if TYPE_CHECKING:
    import torch

TEMPORARY = ".saving-"
REPLACED = ".replaced-"  # before the name of a checkpoint that another one takes the place of
RECORD, MARKER = "state.json", "complete"
# In the header of each tensor file: the checksum of the record that it was saved with.
RECORD_SHA256 = "record_sha256"


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


def replaced_by(path: Path) -> Path:
    """Return where the checkpoint is kept that another one takes the place of."""
    return path.with_name(f"{REPLACED}{path.name}")


def clear_up(run_dir: Path) -> None:
    """Remove what a kill in a save left, and put back what it replaced.

    The caller holds the run's lock, and no save is under way. A replaced checkpoint gets its name
    back if nothing has that name, is deleted if the checkpoint of that name is sound, and else
    stays where it is.
    """
    folder = run_dir / "checkpoints"
    for replaced, step in _with_steps(folder.glob(f"{REPLACED}step-*")):
        final = checkpoint_of(run_dir, step)
        if replaced != replaced_by(final):
            continue  # somebody else's
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
    """Delete a checkpoint. A kill in between leaves none that looks like one."""
    with suppress(OSError):
        temporary = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=path.parent))
        path.rename(temporary / "removed")
        shutil.rmtree(temporary)


def find(run_dir: Path, fits: Callable[[Path, dict[str, Any]], None] | None = None) -> Sound | None:
    """Return the newest checkpoint that is sound; None if there is none at all.

    Args:
        fits: raises ``MisfitError`` for one (its directory and record) that is sound and of another
            run. It is passed over too, if an older one fits.

    Raises:
        CheckpointError: there are checkpoints, and each is damaged: it says what is wrong. Or none
            of those that are sound fits: it is what ``fits`` raised for the newest.
    """
    wrong: list[str] = []
    misfit: MisfitError | None = None
    for path, step in newest_first(run_dir):
        try:
            record = _check_at(path, step)
        except CheckpointError as error:
            if os.path.lexists(path):  # else it was one too many for the run that is under way here
                wrong.append(str(error))
            continue
        try:
            if fits is not None:
                fits(path, record)
        except MisfitError as error:
            misfit = misfit or error
            wrong.append(str(error))
            continue
        return Sound(path, record, wrong)
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
    """Check all checkpoints of a run, and list them, the newest first.

    The run may go on meanwhile: a checkpoint that it deletes is not listed.
    """
    listed: list[Listed] = []
    for path, step in newest_first(run_dir):
        wrong = saved_at = None
        try:
            saved_at = _check_at(path, step)["saved_at"]
        except CheckpointError as error:
            wrong = str(error)
        if listed and listed[-1].global_step == step and listed[-1].wrong is None:
            continue  # replaced by a sound one
        if os.path.lexists(path):
            listed.append(Listed(path, step, _nbytes(path), saved_at, wrong))
    return listed


def _nbytes(path: Path) -> int:
    """Return the bytes of a checkpoint's files, as far as they can be seen."""
    with suppress(OSError):
        return sum(file.stat().st_size for file in path.iterdir() if file.is_file())
    return 0


def record_of(path: Path) -> dict[str, Any]:
    """Read the record of a checkpoint that is sound.

    Raises:
        CheckpointError: it is not any more.
    """
    try:
        return records.parsed(read_regular(path / RECORD, records.MOST_BYTES))
    except (OSError, ValueError) as error:
        raise CheckpointError(path / RECORD, _reason(error)) from error


def tensors(
    path: Path, name: str, elsewhere: Callable[[str], bool] = lambda _: False
) -> dict[str, torch.Tensor]:
    """Read the tensors in a file of a checkpoint that is sound.

    Args:
        elsewhere: of which others read the values: they are on "meta".

    Raises:
        CheckpointError: it is not any more.
    """
    import torch

    from quorate.services.checkpoints.tensor_bytes import read_at

    file = path / name
    try:
        stored = tensor_file.header(file).tensors
        here = {tensor for tensor in stored if not elsewhere(tensor)}
        if reason := too_large(sum(stored[t].stop - stored[t].start for t in here)):
            raise CheckpointError(file, f"reading it takes {reason}")
        read = {}
        with open_regular(file) as opened:
            for tensor, (dtype, shape, start, _) in stored.items():
                device = "cpu" if tensor in here else "meta"
                kind = getattr(torch, dtype)
                read[tensor] = torch.empty(shape, dtype=kind, device=device)
                if tensor in here:
                    read_at(opened.fileno(), read[tensor], start)
        return read
    except (OSError, EOFError) as error:
        raise CheckpointError(file, _reason(error)) from error


def digest_of(path: Path, name: str, order: Iterable[str]) -> str:
    """Return the digest of the tensors in a file, without torch.

    It is ``quorate.replica.digest.digest`` of the same tensors: equal digests, equal bits. Memory
    does not depend on their size.

    Args:
        order: their names, as the checkpoint's record has them under "order".

    Raises:
        CheckpointError: the checkpoint is not sound any more.
    """
    file = path / name
    try:
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
    except OSError as error:
        raise CheckpointError(file, _reason(error)) from error


def newest_first(run_dir: Path) -> list[tuple[Path, int]]:
    """List what has the name of a checkpoint, sound or not, with the steps that the names say.

    A checkpoint whose replacement was cut off comes behind the one that has its name, if one has.

    Raises:
        SettingError: nobody can tell what there is.
    """
    require_seen(run_dir)
    folder = run_dir / "checkpoints"
    # Whatever it is: a link that leads nowhere is a checkpoint that cannot be seen, and not none.
    paths = [*folder.glob("step-*"), *folder.glob(f"{REPLACED}step-*")]
    return sorted(_with_steps(paths), key=lambda item: -item[1])


def _with_steps(paths: Iterable[Path]) -> list[tuple[Path, int]]:
    """Return those paths whose names say a step, with the steps."""
    digits = [(path, path.name.removeprefix(REPLACED).removeprefix("step-")) for path in paths]
    return [(path, int(step)) for path, step in digits if step.isdecimal()]


def is_ours(path: Path, step: int) -> bool:
    """Whether a directory has the name that the checkpoint of a step has.

    There is one form: "step-7", or digits of another script, are somebody else's.
    """
    return path.name == checkpoint_of(path.parent.parent, step).name


def check(path: Path, step: int | None) -> dict[str, Any]:
    """Read every byte of a checkpoint, and return its record.

    Args:
        step: what its directory's name says; None: nothing.

    Raises:
        CheckpointError: something is missing, is not what was written, is of another step, or
            contradicts the rest.
    """
    try:
        return _check(path, step)
    except OSError as error:
        raise CheckpointError(error.filename or path, _reason(error)) from error


def _check_at(path: Path, step: int) -> dict[str, Any]:
    if path.is_symlink() and not path.exists():
        raise CheckpointError(path, "a link that leads nowhere: is a disk not mounted?")
    if not is_ours(path.with_name(path.name.removeprefix(REPLACED)), step):
        expected = checkpoint_of(path.parent.parent, step).name
        raise CheckpointError(path.parent, got=f"{path.name!r}", expected=f"the name {expected!r}")
    try:
        if not stat.S_ISDIR(path.stat().st_mode):
            raise CheckpointError(path, "not a directory")
    except OSError as error:  # a link that leads nowhere
        raise CheckpointError(path, _reason(error)) from error
    return check(path, step)


def check_named(path: Path) -> dict[str, Any]:
    """Check a directory that is said to be a checkpoint, whatever its name.

    Whoever copied it may have renamed it. If the name says a step, it is compared too.

    Raises:
        CheckpointError: see ``check``.
    """
    name = path.resolve().name
    if name.startswith("step-") and name[5:].isascii() and name[5:].isdecimal():
        return check(path, int(name[5:]))
    return check(path, None)


def _check(path: Path, step: int | None) -> dict[str, Any]:
    # 1. The record: its checksum, then what it says.
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
    try:
        record = records.parsed(text)
    except ValueError as error:
        raise CheckpointError(path / RECORD, error) from error
    if step is not None and record["global_step"] != step:
        raise CheckpointError(
            path,
            f"it holds step {record['global_step']}, and its name says {step}",
        )
    # 2. The tensor files: what their headers say, which bounds what is read; then each byte.
    body = records.body_sha256(record)
    for name, sha256 in record["files"].items():
        header = tensor_file.header(path / name)
        if (got := tensor_file.sha256(path / name)) != sha256:
            raise CheckpointError(path / name, got=f"SHA-256 {got}", expected=sha256)
        if (bound := header.metadata.get(RECORD_SHA256, body)) != body:  # none: of before there was
            raise CheckpointError(
                path / name,
                f"it was saved with a record of SHA-256 {records.abridged(bound)}, and this one "
                f"has {body}",
            )
        if wrong := records.contradicts(record, name, header.tensors):
            raise CheckpointError(path / name, wrong)
    return record


def marker(record: bytes) -> bytes:
    """Return what the marker of a record says."""
    return f"{hashlib.sha256(record).hexdigest()}\n".encode()


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)
