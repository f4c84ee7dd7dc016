"""The settings of a run's output: content, frequency and format, and a line in each format."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quorate.services.report import Report
from quorate.settings import Settings, at_least, declare, one_of, switch

PLAIN, DATED, JSON = "plain", "dated", "json"


@dataclass(frozen=True, kw_only=True)
class OutputSettings(Settings):
    """Settings of the output of a run. Only the command sets these.

    Args:
        quiet: whether to leave out the bar, the lines of updates, the table of workers, the line
            about slow workers and the phases of a long start. The first lines, warnings,
            evaluations and saved checkpoints are still printed. Default: False.
        log_every: number of updates between two lines, instead of one line every 5 seconds. The
            lines are printed above the bar on a terminal, and with ``quiet`` too.
        log_format: "plain" (the default); "dated", with date, time and zone before each line and
            with units; "json", one object per line and no bar.
    """

    quiet: bool = declare(
        False, "show no bar, no update lines and no table of workers", kind=bool, check=switch
    )
    log_every: int | None = declare(
        None,
        "print a line every N updates (default: every 5 s, if the output is not a terminal)",
        kind=int,
        metavar="N",
        check=at_least(1),
    )
    log_format: str = declare(
        PLAIN,
        "format of each line: plain, dated (with date, time zone and units) or json",
        kind=str,
        check=lambda name, value: one_of(name, value, (PLAIN, DATED, JSON)),
    )

    def is_due(self, global_step: int) -> bool:
        """Return whether the user wants a line for this update."""
        return self.log_every is not None and global_step % self.log_every == 0

    def line(self, text: str) -> str:
        """Return a message in the chosen format."""
        match self.log_format:
            case "dated":
                return "\n".join(f"{_now()}  {line}" for line in text.splitlines() or [""])
            case "json":
                return json.dumps({"at": _now(), "said": text})
        return text

    def update_line(self, report: Report, metrics: Mapping[str, float], plain: str) -> str:
        """Return the line of an update in the chosen format.

        Args:
            metrics: the metrics of the update, possibly with metrics of other phases.
            plain: the plain line, without the remaining time.
        """
        match self.log_format:
            case "dated":
                left = "" if report.eta_s is None else f"  ETA {report.eta_s:,.0f} s"
                return f"{_now()}  {plain}{left}"
            case "json":
                return json.dumps({"at": _now(), **_record(report, metrics)})
        return plain if report.eta_s is None else f"{plain}  ETA {clock(report.eta_s)}"


def clock(seconds: float) -> str:
    """Return a time in the format of a clock: ``1:02:03`` or ``2:03``."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def _record(report: Report, metrics: Mapping[str, float]) -> dict[str, Any]:
    values = {
        "global_step": report.global_step,
        "last_step": report.last_step,
        "epoch": report.epoch + 1,
        "epochs": report.epochs,
        "metrics": {name: _number(value) for name, value in metrics.items()},
        "lr": _number(report.lr),
        "examples_per_s": _number(report.examples_per_s),
        "eta_s": None if report.eta_s is None else _number(report.eta_s),
    }
    return values | ({} if report.phase is None else {"phase": report.phase})


def _number(value: float) -> float | None:
    """Return a number for JSON: None for NaN and infinity, which JSON lacks."""
    return value if math.isfinite(value) else None


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S%z")
