"""The metrics of a run as lines of JSON: ``metrics.jsonl`` in the run directory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from quorate.engines.worker_status import PHASES, WorkerStatus
from quorate.services.report import Report
from quorate.services.run_directory.line_file import LineFile, RunClock
from quorate.services.run_directory.log_cut import cut

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
