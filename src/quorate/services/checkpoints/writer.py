"""Drafts: incomplete checkpoints, written in a temporary directory until complete.

A file of tensors is created at full size, with its header, before any tensor is written. Several
processes can therefore write one file, each process its own tensors at their offsets. The remaining
steps run once: flush the files to disk, compute the checksums, write the marker, and rename the
directory.

A kill or a power cut at any instant of a save keeps every older sound checkpoint, including a
checkpoint of the same step: a step is saved twice if its checkpoint is both the best and a due
checkpoint.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from quorate.machine.atomic_file import flush_folder, folder_beside, write_atomically
from quorate.services.checkpoints import record as records
from quorate.services.checkpoints import tensor_file
from quorate.services.checkpoints.files import (
    MARKER,
    RECORD,
    RECORD_SHA256,
    TEMPORARY,
    checkpoint_of,
    clear_up,
    marker,
    remove,
    replaced_by,
)
from quorate.services.checkpoints.tensor_bytes import write_at
from quorate.services.checkpoints.tensor_file import Stored

# A new draft deletes the leftovers of earlier drafts, so two drafts must never overlap. The lock is
# held from the creation of a draft to the end of ``finish``.
_ONE_AT_A_TIME = threading.Lock()

Flush = Callable[[], None]  # flushes the files of a draft to disk; raises OSError


class Contents(NamedTuple):
    """The content of a checkpoint: the training state after an update."""

    # Per file: tensors under the user's names, in memory that nobody else changes, or unchanged
    # until ``fill`` returns. The values of tensors on "meta" are held by other processes.
    files: dict[str, dict[str, torch.Tensor]]
    record: dict[str, Any]  # state.json without the checksums
    # Makes every process that holds tensors missing from ``files`` write them. Returns a function
    # that flushes the files of all processes; its argument flushes the files of this process. The
    # returned function is called once, by any thread. Both functions raise OSError. None: ``files``
    # is complete and nobody changes the tensors.
    fill: Callable[[CheckpointWriter], Callable[[Flush], None]] | None = None

    @property
    def global_step(self) -> int:
        """The number of updates applied to the state."""
        step: int = self.record["global_step"]
        return step

    @property
    def nbytes(self) -> int:
        """The size of all tensors, in bytes."""
        return sum(t.nbytes for part in self.files.values() for t in part.values())


def write(run_dir: Path, saved: Contents) -> Path:
    """Write a checkpoint and return its directory. Blocks until the checkpoint is on disk.

    Raises:
        OSError: the disk is full, or the directory is not writable. The error names the path and
            the number of bytes; the older checkpoints are unchanged.
        ValueError: the record could not be read back.
    """
    return CheckpointWriter(run_dir, saved).finish()


class CheckpointWriter:
    """A checkpoint that is being written. Call ``finish``. A second draft waits for the first.

    After the constructor, all tensors are written, though maybe not yet flushed to disk: the caller
    may change them.

    Args:
        run_dir: the run directory.
        saved: the content of the checkpoint.

    Raises:
        OSError, ValueError: see ``write``.
    """

    def __init__(self, run_dir: Path, saved: Contents) -> None:
        self._run_dir = run_dir
        self._checkpoints = run_dir / "checkpoints"
        self._final = checkpoint_of(run_dir, saved.global_step)
        self._nbytes = saved.nbytes
        self.stored: dict[str, dict[str, Stored]] = {}  # positions of the tensors, by file
        self._flush_all: Callable[[Flush], None] = lambda flush: flush()
        _ONE_AT_A_TIME.acquire()
        with self._one_that_fails_is_dropped():
            if not self._checkpoints.is_dir():
                self._checkpoints.mkdir(parents=True, exist_ok=True)
                flush_folder(run_dir)
            clear_up(run_dir)
            self.folder = folder_beside(self._checkpoints, TEMPORARY)
            self._record = {"format": records.FORMAT, **saved.record, "saved_at": time.time()}
            metadata = {"format": "pt", RECORD_SHA256: records.body_sha256(self._record)}
            for name, part in saved.files.items():
                self.stored[name] = _write_tensors(self.folder / name, part, metadata)
            if saved.fill is not None:
                self._flush_all = saved.fill(self)

    def finish(self) -> Path:
        """Flush the checkpoint, rename it into place and return its directory. Blocks. Any thread.

        Raises:
            OSError, ValueError: see ``write``.
        """
        with self._one_that_fails_is_dropped():
            # 1. Flush the files, and write a record with their checksums.
            self._flush_all(self._flush)
            self._record["files"] = {
                name: tensor_file.sha256(self.folder / name) for name in self.stored
            }
            text = (json.dumps(self._record, indent=1) + "\n").encode()
            records.parsed(text)  # refuses to save a record that cannot be read back
            write_atomically(self.folder / RECORD, text)
            # 2. Write the marker with the checksum of the record: a directory without a marker is
            # no checkpoint.
            write_atomically(self.folder / MARKER, marker(text))
            # 3. Rename the draft to its final name. An existing checkpoint of the same step stays
            # complete under another name until the new name is on disk: after a kill in between,
            # ``clear_up`` restores it.
            replaced = replaced_by(self._final)
            if os.path.lexists(replaced):  # ``clear_up`` left it: the final name has no sound one
                remove(self._final)
            elif os.path.lexists(self._final):
                self._final.rename(replaced)
            self.folder.rename(self._final)
            flush_folder(self._checkpoints)
            if os.path.lexists(replaced):
                remove(replaced)
        _ONE_AT_A_TIME.release()
        return self._final

    def _flush(self) -> None:
        for name in self.stored:
            with (self.folder / name).open("rb") as file:
                os.fsync(file.fileno())

    @contextmanager
    def _one_that_fails_is_dropped(self) -> Iterator[None]:
        """Delete the draft and release the lock if the block raises an exception."""
        try:
            yield
        except BaseException as error:
            clear_up(self._run_dir)
            _ONE_AT_A_TIME.release()
            if not isinstance(error, OSError):
                raise
            reason = f"{error.strerror or error}, in a checkpoint of {self._nbytes:,} bytes"
            place = str(error.filename or self._checkpoints)
            raise OSError(error.errno, reason, place) from error


def _write_tensors(
    path: Path, part: dict[str, torch.Tensor], metadata: dict[str, str]
) -> dict[str, Stored]:
    """Create a file of tensors, write the tensors of this process, return all positions."""
    begin, stored = tensor_file.laid_out(
        {name: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in part.items()},
        metadata,
    )
    try:
        with path.open("xb") as file:
            file.write(begin)
            file.flush()
            os.ftruncate(file.fileno(), max((s.stop for s in stored.values()), default=len(begin)))
            for name, tensor in part.items():
                if not tensor.is_meta:
                    write_at(file.fileno(), tensor, stored[name].start)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    return stored
