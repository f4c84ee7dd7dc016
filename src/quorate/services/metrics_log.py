"""The metrics of a run as lines of JSON: ``metrics.jsonl`` in the run directory."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from quorate.errors import UserError
from quorate.machine.valid_json import dumped
from quorate.services.log_cut import cut
from quorate.services.report import Report
from quorate.transports.worker_status import PHASES, WorkerStatus

MOST_WAITING_BYTES = 16 << 20  # while nothing can be written; what is newer is lost
LOOK_EVERY_S = 1.0  # whether the file still has its name
TIMES = ("at", "begun_at", "spent")  # fields that only some lines have: no metric's names
SPENT_EVERY_S = 10.0  # what workers' time went into; at first more often, as runs may be short
SPENT_PER_WORKER_S = 0.1  # and less often with very many, whose figures are long


class MetricsLog:
    """A log of one JSON object per update and per evaluation; ``close`` it.

    A number that is not finite is a string in it: "NaN", "Infinity" or "-Infinity".

    Lines of steps after ``global_step``, which a run that was cut off may have left, are dropped:
    those steps are computed again. What cannot be written waits in memory, on a disk that is full
    or a directory that was removed, and is tried again with each line. Nothing of that raises.

    Args:
        run_dir: is there.
        global_step: where the run goes on.
        say: shows a line to the user.
        renew: ``RunLock.renew``, called before the file is made again.
        status: of the workers, whose time is noted now and then; None: there is none.
    """

    def __init__(
        self,
        run_dir: Path,
        global_step: int,
        say: Callable[[str], None],
        renew: Callable[[], None] = lambda: None,
        status: Callable[[], Sequence[WorkerStatus]] | None = None,
    ) -> None:
        self._path = run_dir / "metrics.jsonl"
        self._say = say
        self._renew = renew
        self._status = status
        # Of the day, as runs go on elsewhere; and by a clock that is never set, from here on.
        self._begun_at, self._begun = time.time(), time.monotonic()
        self._is_first = True
        self._spent_at = self._begun
        self._waiting = bytearray()  # whole lines, or the rest of one and whole lines
        self._is_in_a_line = False  # the first of them was begun in the file
        self._lost = 0  # lines
        self._failing: OSError | UserError | None = None
        self._descriptor: int | None = None
        self._looked_at = time.monotonic()
        self._cut(global_step)
        self._write(b"")

    def update(self, report: Report, slow: Sequence[str] = ()) -> None:
        """Write what an update was. A kill after that loses no line.

        Args:
            slow: workers that were named as slow since the last one, and how.
        """
        record = dict(vars(report))
        if slow:
            record["slow"] = [*slow]
        for name in ("totals", "worker_losses", "last_step", "epochs", "ends_epoch", "eta_s"):
            del record[name]
        if not report.doubts:
            del record["doubts"]
        metrics = record.pop("metrics")
        record |= self._times()
        taken = {*record, *TIMES}
        self._log(record | {f"metric_{n}" if n in taken else n: v for n, v in metrics.items()})

    def evaluation(self, global_step: int, metrics: dict[str, float]) -> None:
        """Write what the validation set gave."""
        times = {"at": self._now()}
        self._log({"global_step": global_step, "validation": metrics, **times})

    def close(self) -> None:
        """Close the file. If something could not be written, that is said."""
        self._write(b"")
        lost = self._lost + self._waiting.count(b"\n")
        if lost:
            self._say(f"{self._path} lacks its last lines, {lost:,}: {self._failing}")
        self._close()

    def _now(self) -> float:
        return round(self._begun_at + time.monotonic() - self._begun, 4)

    def _times(self) -> dict[str, Any]:
        """Return when it is, and now and then what the workers' time went into so far."""
        times: dict[str, Any] = {"at": self._now()}
        if self._is_first:
            self._is_first, times["begun_at"] = False, round(self._begun_at, 4)
        now = time.monotonic()
        every_s = min(SPENT_EVERY_S, max(1.0, (now - self._begun) / 4))
        if self._status is None or now - self._spent_at < every_s:
            return times
        workers = self._status()
        if now - self._spent_at < SPENT_PER_WORKER_S * len(workers):
            return times
        self._spent_at = now
        spent: dict[str, list[float]] = {"shards": [worker.shards for worker in workers]}
        for phase in PHASES:
            spent[phase] = [round(worker.seconds[phase], 4) for worker in workers]
        return times | {"spent": spent}

    # --- the file ---------------------------------------------------------------------------------

    def _log(self, record: dict[str, Any]) -> None:
        known = {name: value for name, value in record.items() if value is not None}
        self._write((dumped(known) + "\n").encode())

    def _write(self, line: bytes) -> None:
        if len(self._waiting) + len(line) <= MOST_WAITING_BYTES:
            self._waiting += line
        else:
            self._lost += 1
        try:
            self._descriptor = self._opened()
            while self._waiting:
                written = os.write(self._descriptor, self._waiting)
                self._is_in_a_line = not self._waiting.endswith(b"\n", 0, written)
                del self._waiting[:written]
        except (OSError, UserError) as error:  # the latter: the directory is another run's now
            if self._failing is None:
                self._say(f"metrics.jsonl is not written, training goes on: {error}")
            self._failing = error
        else:
            if self._failing is not None:
                lost = f", {self._lost:,} lines are lost" if self._lost else ""
                self._say(f"metrics.jsonl is written again{lost}")
            self._failing, self._lost = None, 0

    def _opened(self) -> int:
        """Return a descriptor of the file that has the name, which may have been removed."""
        now = time.monotonic()
        if self._descriptor is not None:
            if now - self._looked_at < LOOK_EVERY_S and self._failing is None:
                return self._descriptor
            self._looked_at = now
            if self._has_its_name(self._descriptor):
                return self._descriptor
            self._close()
        self._renew()
        # O_NONBLOCK: a FIFO in its place would wait for a reader.
        how = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK
        descriptor = os.open(self._path, how, 0o666)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "not a regular file", str(self._path))
        return descriptor

    def _has_its_name(self, descriptor: int) -> bool:
        own = os.fstat(descriptor)
        try:
            return os.path.samestat(self._path.stat(), own)
        except OSError:
            return own.st_nlink > 0  # the directory was moved, and the log with it

    def _close(self) -> None:
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            if self._is_in_a_line:  # its rest belongs to no other file
                del self._waiting[: self._waiting.find(b"\n") + 1]
                self._is_in_a_line = False
            with suppress(OSError):  # of what is on its way to a server; it was said, or never is
                os.close(descriptor)

    # --- a resume ---------------------------------------------------------------------------------

    def _cut(self, global_step: int) -> None:
        path = self._path
        try:
            if not path.exists():
                return
            done = cut(path, global_step)
            if not done.is_a_log:
                aside = _free_name(path)
                path.rename(aside)
                self._say(f"{path} is no log, or a damaged one; it is in {aside} now")
                return
            if done.damaged:
                where = "dropped" if done.kept_in is None else f"in {done.kept_in} now"
                lines = "line" if done.damaged == 1 else "lines"
                self._say(f"{path}: {done.damaged:,} damaged {lines} {where}")
            if done.ends_in_a_line:
                self._waiting += b"\n"
        except OSError as error:
            self._say(f"{path} still has the lines of steps after {global_step:,}: {error}")


def _free_name(path: Path) -> Path:
    number = 1
    while os.path.lexists(aside := path.with_name(f"{path.name}.damaged-{number}")):
        number += 1
    return aside
