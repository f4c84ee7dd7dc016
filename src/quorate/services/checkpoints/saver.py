"""The saving service: copies the state between two updates, for a write in the background.

Training waits for the copy, a pass over the memory of the state, and not for the disk. State spread
over several ranks is not copied: all ranks write their parts to the files, and the system flushes
the files to disk later. Training does wait for saves by steps: so a kill never costs more steps
than the user allowed.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from math import inf
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple

from quorate.engines.tracing import current
from quorate.errors import SaveError, UserError
from quorate.services.checkpoints import files
from quorate.services.checkpoints.writer import CheckpointWriter, Contents, write
from quorate.services.run_directory.contents import NO_ROOM
from quorate.services.run_directory.settings import RunDir


class SaveResult(NamedTuple):
    """The result of a save in the background."""

    global_step: int
    path: Path | None  # None: the save failed
    error: str


class StateSaver:
    """The saver of a run. All methods except ``ask`` belong to the thread of the loop.

    Args:
        run_dir: the run directory.
        settings: when to save, and which checkpoints to keep.
        renew: ``RunLock.renew``, called before each save: the directory may have been removed.
    """

    def __init__(
        self, run_dir: Path, settings: RunDir, renew: Callable[..., None] = lambda **_: None
    ) -> None:
        self._run_dir = run_dir
        self._settings = settings
        self._renew = renew
        self._copied_at = time.monotonic()  # time of the last copy of the state
        self._took_s = 0.0  # seconds from the copy to the checkpoint on disk, in the last save
        self._last: Contents | None = None
        self._asked = False
        self._results: SimpleQueue[SaveResult] = SimpleQueue()
        self._thread: ThreadPoolExecutor | None = None  # a single thread, started when needed
        self._writing: Future[None] | None = None  # the newest save in the thread
        self._trace = current()  # the trace of the run: the writing thread does not inherit it

    def ask(self) -> None:
        """Request a save at the end of the current update. For any thread or signal handler."""
        self._asked = True

    def is_due(self, global_step: int) -> bool:
        """Return whether the state after this update has to be saved now."""
        every_s = self._settings.save_every_s
        is_time = False
        if every_s is not None:
            # Start early enough for the checkpoint to be on disk in time.
            early_s = min(2 * self._took_s, every_s / 4)
            is_time = time.monotonic() - self._copied_at >= every_s - early_s
        return self._is_due_by_steps(global_step) or ((self._asked or is_time) and self._is_idle)

    @property
    def _is_idle(self) -> bool:
        return self._writing is None or self._writing.done()

    @property
    def spare(self) -> Contents | None:
        """The last copy of the state, if its memory may be overwritten; else None."""
        return self._last if self._is_idle else None

    def save(self, contents: Contents) -> None:
        """Write a checkpoint in the background. Waits for an earlier save in progress.

        If no thread can be started, the checkpoint is written, or has failed, before the call
        returns.
        """
        self.finish()
        self._asked, self._last = False, contents if contents.fill is None else None
        self._copied_at = time.monotonic()
        draft = None
        if contents.fill is not None:
            try:
                self._renew()
                draft = CheckpointWriter(self._run_dir, contents)
            except (OSError, ValueError) as error:
                self._results.put(SaveResult(contents.global_step, None, str(error)))
                return
        self._thread = self._thread or ThreadPoolExecutor(1, "quorate-checkpoints", _give_way)
        try:
            self._writing = self._thread.submit(self._write_one, contents, draft)
        except RuntimeError:  # the system has too many threads, or no memory
            self._thread = None
            self._write_one(contents, draft)
        if self._is_due_by_steps(contents.global_step):
            self.finish()

    def results(self) -> list[SaveResult]:
        """Return the results of all saves that ended since the last call. Does not block."""
        results = []
        with suppress(Empty):
            while True:
                results.append(self._results.get_nowait())
        return results

    def finish(self) -> None:
        """Wait until the save in progress is on disk."""
        if self._writing is not None:
            self._writing.result()

    def close(self) -> None:
        """Finish the save in progress and end the thread."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def write(self, contents: Contents) -> Path:
        """Write a checkpoint and return its directory when it is on disk.

        Raises:
            SaveError: the checkpoint cannot be written.
        """
        self.finish()
        try:
            self._renew(make=True)  # make the directory again: this may be the last save of the run
            with self._spanning("writing a checkpoint"):
                path = write(self._run_dir, contents)
                self._tidy(contents)
        except OSError as error:
            raise self._not_saved(contents.global_step, error) from error
        return path

    def _not_saved(self, global_step: int, error: OSError) -> SaveError:
        older: list[tuple[Path, int]] = []
        with suppress(UserError, OSError):
            older = files.newest_first(self._run_dir)
        cure = "make room there" if error.errno in NO_ROOM else "fix that"
        start = f"step {older[0][1]:,}" if older else "the beginning"
        return SaveError(
            f"step {global_step:,} is not saved",
            error.errno,
            why=error,
            fix=f"{cure}, and run the same command again: it resumes from {start}",
        )

    def _spanning(self, name: str, track: str = "") -> AbstractContextManager[None]:
        return nullcontext() if self._trace is None else self._trace.span(name, track)

    # --- in the writing thread ----------------------------------------------------------------

    def _write_one(self, contents: Contents, draft: CheckpointWriter | None) -> None:
        """Write a checkpoint, and queue its outcome for the loop."""
        try:
            with self._spanning("writing a checkpoint", "checkpoints"):
                if draft is None:
                    self._renew()
                    draft = CheckpointWriter(self._run_dir, contents)
                path = draft.finish()
                self._tidy(contents)
            self._took_s = time.monotonic() - self._copied_at
            outcome = SaveResult(contents.global_step, path, "")
        except Exception as error:  # the edge of the thread: the loop reports the error to the user
            outcome = SaveResult(contents.global_step, None, str(error))
        self._results.put(outcome)

    def _is_due_by_steps(self, global_step: int) -> bool:
        every_steps = self._settings.save_every_steps
        return every_steps is not None and global_step % every_steps == 0

    def _tidy(self, contents: Contents) -> None:
        """Delete surplus checkpoints by TF1's rule.

        The newest few stay, and one per so many hours for good; the best stays until a better one
        exists. Checkpoints of later steps were skipped as damaged: the run will reach those steps
        again and replace them.
        """
        listed = files.newest_first(self._run_dir)
        paths = {step: path for path, step in listed if files.is_ours(path, step)}
        past = sorted(step for step in paths if step <= contents.global_step)
        stay = set(past[-self._settings.keep :])
        if (best := contents.record["account"]["best"]) is not None:
            stay.add(best["global_step"])
        if (every_h := self._settings.keep_every_h) is not None:
            last_at = -inf  # time of the last checkpoint that stays for good
            for step in past:
                if (at := _written_at(paths[step])) >= last_at + 3600 * every_h:
                    last_at = at
                    stay.add(step)
        for step in past:
            if step not in stay:
                files.remove(paths[step])


def _written_at(path: Path) -> float:
    with suppress(OSError):
        return (path / files.MARKER).stat().st_mtime
    return 0.0  # a damaged checkpoint


def _give_way() -> None:
    """Lower the priority of this thread below the workers', where threads have priorities."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
