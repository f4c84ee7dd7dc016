"""The metrics of a run as lines of JSON: ``metrics.jsonl`` in the run directory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from quorate.engines.worker_status import PHASES, WorkerStatus
from quorate.machine.valid_json import dumped
from quorate.services.line_file import LineFile
from quorate.services.log_cut import cut
from quorate.services.report import Report

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
        self._status = status
        # Of the day, as runs go on elsewhere; and by a clock that is never set, from here on.
        self._begun_at, self._begun = time.time(), time.monotonic()
        self._is_first = True
        self._spent_at = self._begun
        ends_in_a_line = self._cut(global_step)
        self._lines = LineFile(self._path, say, renew, ends_in_a_line=ends_in_a_line)

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
        self._lines.close()

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
        return times | {"spent": spent(workers)}

    def _log(self, record: dict[str, Any]) -> None:
        known = {name: value for name, value in record.items() if value is not None}
        self._lines.write((dumped(known) + "\n").encode())

    # --- a resume ---------------------------------------------------------------------------------

    def _cut(self, global_step: int) -> bool:
        """Take lines of later steps out; return whether the last line that stays has no end."""
        path = self._path
        try:
            if not path.exists():
                return False
            done = cut(path, global_step)
            if not done.is_a_log:
                aside = _free_name(path)
                path.rename(aside)
                self._say(f"{path} is damaged or not a log; moved the file to {aside}")
                return False
            if done.damaged:
                how = "dropped" if done.kept_in is None else "moved"
                where = "" if done.kept_in is None else f" to {done.kept_in}"
                lines = "line" if done.damaged == 1 else "lines"
                self._say(f"{path}: {how} {done.damaged:,} damaged {lines}{where}")
            return done.ends_in_a_line
        except OSError as error:
            self._say(f"{path} still has the lines of steps after {global_step:,}: {error}")
        return False


def spent(workers: Sequence[WorkerStatus]) -> dict[str, list[float]]:
    """Return what the time of each worker went into so far: shards, and seconds by phase."""
    sums: dict[str, list[float]] = {"shards": [worker.shards for worker in workers]}
    for phase in PHASES:
        sums[phase] = [round(worker.seconds[phase], 4) for worker in workers]
    return sums


def _free_name(path: Path) -> Path:
    number = 1
    while os.path.lexists(aside := path.with_name(f"{path.name}.damaged-{number}")):
        number += 1
    return aside
