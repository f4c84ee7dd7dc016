"""Drafts: checkpoints that are being written, in a temporary directory until they are whole.

A file of tensors is made in its full size, with its header, before any tensor is in it. So several
processes can write one: each puts what it has where it belongs. The rest is done once: files are
flushed to the disk, read for their checksums, and get their marker and their place.

A kill or a power cut at any instant of a save leaves every older sound checkpoint, also one of the
same step: a step is saved twice where its checkpoint is the best and a due one.
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

# Whoever begins a draft deletes what other drafts have left. Held from its beginning to its end.
_ONE_AT_A_TIME = threading.Lock()

Flush = Callable[[], None]  # brings the files of a draft to the disk; raises OSError


class Contents(NamedTuple):
    """What goes into a checkpoint: a state after some update."""

    # By file, tensors under the user's names: in memory of their own, or as long as ``fill`` takes.
    # Those on "meta" are elsewhere.
    files: dict[str, dict[str, torch.Tensor]]
    record: dict[str, Any]  # state.json but for the checksums
    # Has all who have tensors that are not here write them; returns what flushes all their files,
    # given what flushes those of this process, and is called once, by any thread. Both raise
    # OSError. None: all are here, and nobody changes them.
    fill: Callable[[Draft], Callable[[Flush], None]] | None = None

    @property
    def global_step(self) -> int:
        """Updates applied to the state."""
        step: int = self.record["global_step"]
        return step

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for part in self.files.values() for t in part.values())


def write(run_dir: Path, saved: Contents) -> Path:
    """Write a checkpoint and return its directory. Blocks until it is on the disk.

    Raises:
        OSError: the disk is full, or the directory cannot be written to. It names the path and
            the bytes; the older checkpoints are as they were.
        ValueError: the record could not be read again.
    """
    return Draft(run_dir, saved).finish()


class Draft:
    """A checkpoint that is being written. ``finish`` it. There is one at a time: others wait.

    When it is made all tensors have been written, though maybe not to the disk: they may change.

    Args:
        run_dir: of the run.
        saved: what goes into it.

    Raises:
        OSError, ValueError: see ``write``.
    """

    def __init__(self, run_dir: Path, saved: Contents) -> None:
        self._run_dir = run_dir
        self._checkpoints = run_dir / "checkpoints"
        self._final = checkpoint_of(run_dir, saved.global_step)
        self._nbytes = saved.nbytes
        self.stored: dict[str, dict[str, Stored]] = {}  # where tensors lie, by file
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
        """Bring it to the disk and to its place, and return its directory. Blocks. Any thread.

        Raises:
            OSError, ValueError: see ``write``.
        """
        with self._one_that_fails_is_dropped():
            # 1. The files, and a record that has their checksums.
            self._flush_all(self._flush)
            self._record["files"] = {
                name: tensor_file.sha256(self.folder / name) for name in self.stored
            }
            text = (json.dumps(self._record, indent=1) + "\n").encode()
            records.parsed(text)  # what could not be read again is not saved
            write_atomically(self.folder / RECORD, text)
            # 2. The marker, which has the record's checksum: without it there is no checkpoint.
            write_atomically(self.folder / MARKER, marker(text))
            # 3. The place. A checkpoint of this step that is there stays whole beside it until the
            # new one's name is on the disk: after a kill in between ``clear_up`` puts it back.
            replaced = replaced_by(self._final)
            if os.path.lexists(replaced):  # ``clear_up`` found nothing sound in its place
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
        """Have nothing be left of it when something is raised in the block."""
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
    """Make a file of tensors with those that are here in it; return where each lies."""
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
