"""The logs of a run as lines of JSON in its directory: ``events.jsonl`` and ``metrics.jsonl``.

Events are the lines shown by a run, its checkpoints, and shards taken over by another worker. A
resumed run continues the file: unlike metrics, events of recomputed steps stay.

    {"at": 1795559878.2951, "global_step": 404, "kind": "lost", "worker": 1, "text": "worker 1 ..."}

The first event of a fit has the kind "start", the script and the settings; the last one has the
kind "end" and the final state of the run. A killed fit has no "end".
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from quorate.coordination.run_event import START, WARNING, RunEvent
from quorate.engines.worker_status import PHASES, WorkerStatus
from quorate.errors import UserError
from quorate.machine.regular_file import open_regular
from quorate.machine.valid_json import dumped
from quorate.services.report import Report
from quorate.services.run_directory.log_cut import cut

MOST_WAITING_BYTES = 16 << 20  # while writing fails; newer lines are lost
LOOK_EVERY_S = 1.0  # interval of the check that the file still has its name


class RunClock:
    """The time of day for the lines of a log: the same clock on all hosts, and never set back.

    Attributes:
        begun_at: the time of day when the clock was made, in seconds since the epoch.
        begun: the same moment by ``time.monotonic()``, which continues the time of day.
    """

    def __init__(self) -> None:
        self.begun_at, self.begun = round(time.time(), 4), time.monotonic()

    def now(self) -> float:
        """Return the time of day, in seconds since the epoch."""
        return round(self.begun_at + time.monotonic() - self.begun, 4)


class LineFile:
    """A file to which lines of JSON are appended. Call ``close`` at the end.

    On a full disk or in a removed directory, lines wait in memory, and are written again with the
    next line. No such failure raises an exception.

    Args:
        path: the path of the file, in an existing folder.
        say: shows a line to the user.
        renew: ``RunLock.renew``, called before the file is made again.
    """

    def __init__(
        self,
        path: Path,
        say: Callable[[str], None],
        renew: Callable[[], None] = lambda: None,
    ) -> None:
        self._path = path
        self._say = say
        self._renew = renew
        # Whole lines, possibly after the rest of a line, or the end of a line cut by a kill.
        self._waiting = bytearray(b"\n" if _ends_in_a_line(path) else b"")
        self._is_in_a_line = False  # whether the first waiting line is partly written
        self._lost = 0  # number of lines
        self._failing: OSError | UserError | None = None
        self._descriptor: int | None = None
        self._looked_at = time.monotonic()
        self._write(b"")

    def close(self) -> None:
        """Close the file, and report lines that could not be written."""
        self._write(b"")
        lost = self._lost + self._waiting.count(b"\n")
        if lost:
            lines = "line" if lost == 1 else f"{lost:,} lines"
            self._say(f"{self._path} lacks the last {lines}: {self._failing}")
        self._close()

    def add(self, record: Mapping[str, Any]) -> None:
        """Append a line with an object; see ``dumped``."""
        self._write(f"{dumped(record)}\n".encode())

    def _write(self, line: bytes) -> None:
        """Append a line, after the lines that wait."""
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
        except (OSError, UserError) as error:  # UserError: the directory belongs to another run now
            if self._failing is None:
                self._say(f"{self._path.name} cannot be written, training continues: {error}")
            self._failing = error
        else:
            if self._failing is not None:
                lost = f", {self._lost:,} lines are lost" if self._lost else ""
                self._say(f"{self._path.name} can be written again{lost}")
            self._failing, self._lost = None, 0

    def _opened(self) -> int:
        """Return a descriptor of the file under the path, which is made again if it was removed."""
        now = time.monotonic()
        if self._descriptor is not None:
            if now - self._looked_at < LOOK_EVERY_S and self._failing is None:
                return self._descriptor
            self._looked_at = now
            if self._has_its_name(self._descriptor):
                return self._descriptor
            self._close()
        self._renew()
        # O_NONBLOCK: opening a FIFO in the file's place would block until there is a reader.
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
            if self._is_in_a_line:  # drop the rest of a line: the rest must not go to a new file
                del self._waiting[: self._waiting.find(b"\n") + 1]
                self._is_in_a_line = False
            with suppress(OSError):  # a network file system reports late errors
                os.close(descriptor)


def _ends_in_a_line(path: Path) -> bool:
    """Return whether the last line of a file has no line end, as a kill may leave it."""
    try:
        with open_regular(path) as file:
            if file.seek(0, 2) == 0:
                return False
            file.seek(-1, 2)
            return file.read(1) != b"\n"
    except OSError:
        return False


# --- events.jsonl ---------------------------------------------------------------------------------

EVENT_LOG = "events.jsonl"


class EventLog:
    """A log of one JSON object per event. Any thread may add events; call ``close`` at the end.

    Events wait in memory until the log is opened: before that, the run directory may turn out to
    belong to another run.
    """

    def __init__(self) -> None:
        # reentrant: a signal handler may add an event while its own thread adds one
        self._lock = threading.RLock()
        self._clock = RunClock()
        self._waiting: list[dict[str, Any]] = []
        self._global_step: Callable[[], int] = lambda: 0
        self._file: LineFile | None = None
        self._is_closed = False

    def add(self, line: str, **more: Any) -> None:
        """Add an event; a plain line is a warning.

        Args:
            line: the text of the event.
            more: further entries of the event, as JSON.
        """
        event = line if isinstance(line, RunEvent) else RunEvent(line, WARNING)
        record: dict[str, Any] = {"at": self._clock.now(), "kind": event.kind, "text": str(event)}
        record |= more
        if event.worker is not None:
            record["worker"] = event.worker
        with self._lock:
            if self._file is not None:
                self._write(record)
            elif not self._is_closed:
                self._waiting.append(record)

    def open(
        self,
        run_dir: Path,
        global_step: Callable[[], int],
        started: str,
        facts: Mapping[str, Any],
        say: Callable[[str], None],
        renew: Callable[[], None] = lambda: None,
    ) -> None:
        """Write the start of the fit, then the waiting events.

        Args:
            run_dir: the run directory, locked by this process.
            global_step: returns the updates applied so far.
            started: text of the start event; the time of the event is the creation time of this
                log.
            facts: further entries of the start event.
            say: shows a line about this file to the user, without adding the line to the log.
            renew: ``RunLock.renew``, called before the file is made again.
        """
        with self._lock:
            self._global_step = global_step
            self._file = LineFile(run_dir / EVENT_LOG, say, renew)
            self._write({"at": self._clock.begun_at, "kind": START, "text": started, **facts})
            waiting, self._waiting = self._waiting, []
            for record in waiting:
                self._write(record)

    def close(self) -> None:
        """Close the file. Later events are dropped."""
        with self._lock:
            file, self._file, self._is_closed = self._file, None, True
            if file is not None:
                file.close()

    def _write(self, record: Mapping[str, Any]) -> None:
        assert self._file is not None
        step = {"at": record["at"], "global_step": self._global_step()}
        self._file.add(step | {**record})


# --- metrics.jsonl --------------------------------------------------------------------------------

TIMES = ("at", "begun_at", "spent")  # fields of some lines only: no metric may use these names
SPENT_EVERY_S = 10.0  # between notes of the workers' time; less at first, as runs may be short
SPENT_PER_WORKER_S = 0.1  # fewer notes with very many workers, whose notes are long


class MetricsLog:
    """A log of one JSON object per update and per evaluation. Call ``close`` at the end.

    A number that is not finite is written as a string: "NaN", "Infinity" or "-Infinity".

    Lines of steps after ``global_step``, left by an interrupted run, are removed: the resumed run
    computes these steps again. On a full disk or in a removed directory, lines wait in memory, and
    are written again with the next line. No such failure raises an exception.

    Args:
        run_dir: an existing directory.
        global_step: the step at which the run resumes.
        say: shows a line to the user.
        renew: ``RunLock.renew``, called before the file is made again.
        status: returns the status of the workers, whose times are noted now and then; None: no
            workers.
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
        self._status = status
        self._clock = RunClock()
        self._is_first = True
        self._spent_at = self._clock.begun
        self._cut(global_step)
        self._lines = LineFile(self._path, say, renew)

    def update(self, report: Report, slow: Sequence[str] = ()) -> None:
        """Write the report of an update. A later kill does not lose the line.

        Args:
            slow: descriptions of workers named as slow since the previous update.
        """
        record = dict(vars(report))
        if slow:
            record["slow"] = [*slow]
        for name in ("totals", "worker_losses", "last_step", "epochs", "ends_epoch", "eta_s"):
            del record[name]
        for name in ("doubts", "lrs", "weights"):
            if not record[name]:
                del record[name]
        metrics = record.pop("metrics")
        record |= self._times()
        taken = {*record, *TIMES}
        self._log(record | {f"metric_{n}" if n in taken else n: v for n, v in metrics.items()})

    def evaluation(self, global_step: int, metrics: dict[str, float]) -> None:
        """Write the metrics of an evaluation of the validation set."""
        at = self._clock.now()
        self._log({"global_step": global_step, "validation": metrics, "at": at})

    def close(self) -> None:
        """Close the file, and report lines that could not be written."""
        self._lines.close()

    def _times(self) -> dict[str, Any]:
        """Return the time and, now and then, the seconds that workers spent in each phase."""
        times: dict[str, Any] = {"at": self._clock.now()}
        if self._is_first:
            self._is_first, times["begun_at"] = False, self._clock.begun_at
        now = time.monotonic()
        every_s = min(SPENT_EVERY_S, max(1.0, (now - self._clock.begun) / 4))
        if self._status is None or now - self._spent_at < every_s:
            return times
        workers = self._status()
        if now - self._spent_at < SPENT_PER_WORKER_S * len(workers):
            return times
        self._spent_at = now
        return times | {"spent": spent(workers)}

    def _log(self, record: dict[str, Any]) -> None:
        self._lines.add({name: value for name, value in record.items() if value is not None})

    # --- a resume ---------------------------------------------------------------------------------

    def _cut(self, global_step: int) -> None:
        """Remove lines of later steps, and damaged lines."""
        path = self._path
        try:
            if not path.exists():
                return
            done = cut(path, global_step)
            if not done.is_a_log:
                aside = _free_name(path)
                path.rename(aside)
                self._say(f"{path} is damaged or not a log; moved the file to {aside}")
            elif done.damaged:
                how = "dropped" if done.kept_in is None else "moved"
                where = "" if done.kept_in is None else f" to {done.kept_in}"
                lines = "line" if done.damaged == 1 else "lines"
                self._say(f"{path}: {how} {done.damaged:,} damaged {lines}{where}")
        except OSError as error:
            self._say(f"{path} still has the lines of steps after {global_step:,}: {error}")


def spent(workers: Sequence[WorkerStatus]) -> dict[str, list[float]]:
    """Return the shards and the seconds in each phase, of each worker so far."""
    sums: dict[str, list[float]] = {"shards": [worker.shards for worker in workers]}
    for phase in PHASES:
        sums[phase] = [round(worker.seconds[phase], 4) for worker in workers]
    return sums


def _free_name(path: Path) -> Path:
    number = 1
    while os.path.lexists(aside := path.with_name(f"{path.name}.damaged-{number}")):
        number += 1
    return aside
