"""The service that saves: a copy of the state between two updates, written in the background.

Training waits for the copy, a pass over the state's memory, and not for the disk. A state that lies
on several ranks is not copied: all write it to its files, which the system brings to the disk
later. Saves by steps training does wait for: no kill costs more steps than were asked for.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple

from quorate.engines.tracing import current
from quorate.errors import SaveError, UserError
from quorate.services.checkpoints import files
from quorate.services.checkpoints.draft import Contents, Draft, write
from quorate.services.checkpoints.retention import Saved, surplus
from quorate.services.run_contents import NO_ROOM


class Policy(NamedTuple):
    """When to save, and what stays."""

    every_s: float | None = 600.0
    every_steps: int | None = None
    keep: int = 5
    keep_every_h: float | None = None


class Outcome(NamedTuple):
    """What became of a save."""

    global_step: int
    path: Path | None  # None: it failed
    error: str


class Checkpoints:
    """Saves a run. Its methods are for the thread of the loop, but for ``ask``.

    Args:
        run_dir: of the run.
        policy: when, and what stays.
        renew: ``RunLock.renew``, called before each save: the directory may have been removed.
    """

    def __init__(
        self, run_dir: Path, policy: Policy, renew: Callable[..., None] = lambda **_: None
    ) -> None:
        self._run_dir = run_dir
        self._policy = policy
        self._renew = renew
        self._copied_at = time.monotonic()  # the state that was saved last
        self._took_s = 0.0  # to write it
        self._last: Contents | None = None
        self._asked = False
        # With what was begun of it, where its tensors may change from now on.
        self._waiting: SimpleQueue[tuple[Contents, Draft | None] | None] = SimpleQueue()
        self._outcomes: SimpleQueue[Outcome] = SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._thread: threading.Thread | None = None
        self._trace = current()  # of the run, whose thread this one's is not

    def ask(self) -> None:
        """Save at the end of the update under way. Any thread, also a signal handler, may."""
        self._asked = True

    def is_due(self, global_step: int) -> bool:
        """Whether the state after this update is to be saved now."""
        every_s = self._policy.every_s
        is_time = False
        if every_s is not None:
            # So early that it is on the disk when it has to be.
            early_s = min(2 * self._took_s, every_s / 4)
            is_time = time.monotonic() - self._copied_at >= every_s - early_s
        return self._is_due_by_steps(global_step) or (
            (self._asked or is_time) and self._idle.is_set()
        )

    @property
    def spare(self) -> Contents | None:
        """The last copy of the state, if its memory may be used again."""
        return self._last if self._idle.is_set() else None

    def save(self, contents: Contents) -> None:
        """Write these in the background. Waits for an earlier save that is under way.

        Where no thread can be started, these are on the disk when it returns, or cannot be.
        """
        self._idle.wait()
        self._asked, self._last = False, contents if contents.fill is None else None
        self._copied_at = time.monotonic()
        draft = None
        if contents.fill is not None:
            try:
                self._renew()
                draft = Draft(self._run_dir, contents)
            except (OSError, ValueError) as error:
                self._outcomes.put(Outcome(contents.global_step, None, str(error)))
                return
        if not self._has_thread():
            self._write_one(contents, draft)
            return
        self._idle.clear()
        self._waiting.put((contents, draft))
        if self._is_due_by_steps(contents.global_step):
            self._idle.wait()

    def outcomes(self) -> list[Outcome]:
        """Return what became of saves since the last call. Does not block."""
        outcomes = []
        with suppress(Empty):
            while True:
                outcomes.append(self._outcomes.get_nowait())
        return outcomes

    def finish(self) -> None:
        """Wait until what is under way is on the disk."""
        self._idle.wait()

    def close(self) -> None:
        """Finish, and end the thread."""
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join()
            self._thread = None

    def write(self, contents: Contents) -> Path:
        """Write these, and return their directory when they are on the disk.

        Raises:
            SaveError: they cannot be written.
        """
        self.finish()
        try:
            self._renew(make=True)  # nobody may come back to save it later
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

    def _has_thread(self) -> bool:
        """Start the thread that writes, unless there is one; return whether there is one now."""
        if self._thread is None:
            thread = threading.Thread(target=self._write_all, name="quorate-checkpoints")
            try:
                thread.start()
            except RuntimeError:  # the system starts none at present: too many, or no memory
                return False
            self._thread = thread
        return True

    def _spanning(self, name: str, track: str = "") -> AbstractContextManager[None]:
        return nullcontext() if self._trace is None else self._trace.span(name, track)

    # --- in its own thread ------------------------------------------------------------------------

    def _write_all(self) -> None:
        _give_way()
        while (waiting := self._waiting.get()) is not None:
            self._write_one(*waiting)
            self._idle.set()

    def _write_one(self, contents: Contents, draft: Draft | None) -> None:
        """Write a checkpoint, and put what became of it where the loop finds it."""
        try:
            with self._spanning("writing a checkpoint", "checkpoints"):
                if draft is None:
                    self._renew()
                    draft = Draft(self._run_dir, contents)
                path = draft.finish()
                self._tidy(contents)
            self._took_s = time.monotonic() - self._copied_at
            outcome = Outcome(contents.global_step, path, "")
        except Exception as error:  # the edge of the thread: the loop tells the user
            outcome = Outcome(contents.global_step, None, str(error))
        self._outcomes.put(outcome)

    def _is_due_by_steps(self, global_step: int) -> bool:
        every_steps = self._policy.every_steps
        return every_steps is not None and global_step % every_steps == 0

    def _tidy(self, contents: Contents) -> None:
        """Delete what need not stay."""
        listed = files.newest_first(self._run_dir)
        paths = {step: path for path, step in listed if files.is_ours(path, step)}
        every_h = self._policy.keep_every_h
        best = contents.record["account"]["best"]
        for step in surplus(
            (Saved(step, _written_at(path)) for step, path in paths.items()),
            contents.global_step,
            keep=self._policy.keep,
            every_s=None if every_h is None else 3600 * every_h,
            best=None if best is None else best["global_step"],
        ):
            files.remove(paths[step])


def _written_at(path: Path) -> float:
    with suppress(OSError):
        return (path / files.MARKER).stat().st_mtime
    return 0.0  # damaged


def _give_way() -> None:
    """Let workers have the core first, where a thread can have a priority of its own."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
