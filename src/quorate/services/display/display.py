"""The display: the progress of a run, as a live bar on a terminal, as lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TextIO, cast

from rich.console import Console
from rich.live import Live

from quorate.engines.worker_status import WorkerStatus
from quorate.machine.standard_streams import Steady
from quorate.machine.text import in_four_places
from quorate.services.device_use import DeviceUse
from quorate.services.display.live_view import LiveView
from quorate.services.display.shown import DATED, JSON, OutputSettings, clock
from quorate.services.display.worker_rows import Row, WorkerRows, plain
from quorate.services.report import Report
from quorate.settings import resolved

LINE_EVERY_S = 5.0
TABLE_EVERY_S = 60.0  # elsewhere than on a terminal, where each table lengthens the log
TABLE_AFTER_S = 10.0  # shortest run with a table at its end: a shorter run has few figures


class Display(ABC):
    """The display of a run. The loop's thread and a service's thread may call it simultaneously.

    Args:
        shown: the settings of the output.
    """

    def __init__(self, shown: OutputSettings | None) -> None:
        self._shown = shown or OutputSettings()
        self._newest = PhaseMetrics()
        self._table = WorkerRows()

    def say(self, text: str) -> None:
        """Show a line that stays."""
        self._print(self._shown.line(text))

    def mention(self, text: str) -> None:
        """Show a line that stays, unless the user wants a quiet run."""
        if not self._shown.quiet:
            self.say(text)

    @abstractmethod
    def update(self, report: Report) -> None:
        """Note an update. The display decides how often to show one."""

    @abstractmethod
    def workers(self, workers: Sequence[WorkerStatus], uses: Sequence[DeviceUse]) -> None:
        """Show the state of all workers.

        Call every few seconds, from one thread: the speeds shown cover the time since the previous
        call.
        """

    @abstractmethod
    def close(self) -> None:
        """Show the final state: the run is over."""

    @abstractmethod
    def _print(self, line: str) -> None:
        """Print a line in its final format."""

    def _print_update(self, report: Report, metrics: Mapping[str, float]) -> None:
        plain = line_of(report, metrics, dated=self._shown.log_format == DATED)
        self._print(self._shown.update_line(report, metrics, plain))


def display(stream: TextIO | Steady | None = None) -> Display:
    """Return the display that fits a stream (default: standard output) and the settings.

    A stream that cannot be written any more is ignored from then on.
    """
    stream = sys.stdout if stream is None else stream
    out = stream if isinstance(stream, Steady) else Steady(stream)
    shown = resolved(OutputSettings, None)
    if out.isatty() and not shown.quiet and shown.log_format != JSON:
        # markup=False: the output of user code, such as "[b]", is no markup and is shown unchanged.
        console = Console(file=cast(TextIO, out), markup=False, highlight=False, emoji=False)
        if not console.is_dumb_terminal:  # a dumb terminal shows a bar at the end alone
            return Bar(console, shown)
    return Lines(out, shown)


class Lines(Display):
    """A display of one line every few seconds, at the end of an epoch, and at the end.

    The table of workers is shown once a minute, and at the end of a run of at least
    ``TABLE_AFTER_S``.
    """

    def __init__(self, stream: TextIO | Steady, shown: OutputSettings | None = None) -> None:
        super().__init__(shown)
        self._stream = stream
        self._writing = threading.RLock()  # reentrant, for signal handlers of the thread
        self._begun_at = self._shown_at = self._table_at = time.monotonic()
        self._first = True
        self._rows: list[Row] = []  # the newest rows, not shown yet
        self._shows_tables = False  # whether a table was shown before

    def _print(self, line: str) -> None:
        with self._writing:
            print(line, file=self._stream, flush=True)

    def update(self, report: Report) -> None:
        """Take note of an update."""
        metrics = self._newest.of(report)
        if self._is_due(report):
            self._shown_at, self._first = time.monotonic(), False
            self._print_update(report, metrics)

    def _is_due(self, report: Report) -> bool:
        if self._shown.quiet or self._shown.log_every is not None:
            return self._shown.is_due(report.global_step)
        is_time = self._first or time.monotonic() - self._shown_at >= LINE_EVERY_S
        return is_time or report.ends_epoch

    def workers(self, workers: Sequence[WorkerStatus], uses: Sequence[DeviceUse]) -> None:
        """Show the state of all workers."""
        now = time.monotonic()
        self._rows = self._table.rows(workers, uses, now)
        if now - self._table_at >= TABLE_EVERY_S and not self._shown.quiet:
            self._table_at = now
            self._show_table()

    def close(self) -> None:
        """Show the table of workers, unless the run was very short."""
        is_long = time.monotonic() - self._begun_at >= TABLE_AFTER_S and not self._shown.quiet
        if self._rows and (self._shows_tables or is_long):
            self._show_table()

    def _show_table(self) -> None:
        self.say(plain(self._rows))
        self._rows, self._shows_tables = [], True


class Bar(Display):
    """A progress bar with the newest numbers, above a table of workers.

    Other lines scroll above the bar.
    """

    def __init__(self, console: Console, shown: OutputSettings | None = None) -> None:
        super().__init__(shown)
        self._view = LiveView()
        self._live = Live(console=console, refresh_per_second=4, get_renderable=lambda: self._view)

    def _print(self, line: str) -> None:
        self._live.console.print(line, markup=False, highlight=False)

    def update(self, report: Report) -> None:
        """Show the numbers of an update."""
        metrics = self._newest.of(report)
        if self._shown.is_due(report.global_step):
            self._print_update(report, metrics)
        eta = "" if report.eta_s is None else f"ETA {clock(report.eta_s)}"
        what = numbers(report, metrics)
        self._view.update(position(report), what, eta, report.global_step, report.last_step)
        if not self._live.is_started:
            with suppress(RuntimeError):  # no thread can be started: each update draws the bar
                self._live.start()

    def workers(self, workers: Sequence[WorkerStatus], uses: Sequence[DeviceUse]) -> None:
        """Show the state of all workers."""
        self._view.workers(self._table.rows(workers, uses, time.monotonic()))

    def close(self) -> None:
        """Leave the bar as it is, and the terminal as it was."""
        self._live.stop()


def line_of(report: Report, shown: Mapping[str, float], *, dated: bool) -> str:
    """Return the line of an update, without the remaining time.

    Args:
        shown: the metrics of the update, possibly with metrics of other phases.
        dated: whether to add the units that a person infers.
    """
    unit = " updates" if dated else ""
    return f"{position(report)}{unit}  {numbers(report, shown)}"


def position(report: Report) -> str:
    """Return the position of a run: ``epoch 2/5  step 300/1,175``."""
    return (
        f"epoch {report.epoch + 1}/{report.epochs}  "
        f"step {report.global_step:,}/{report.last_step:,}"
    )


class PhaseMetrics:
    """The newest metrics of all phases: an update has only the metrics of its own phase."""

    def __init__(self) -> None:
        self._metrics: dict[str, float] = {}

    def of(self, report: Report) -> Mapping[str, float]:
        """Return the metrics to show for an update, in the order of their first appearance."""
        if report.phase is None:
            return report.metrics
        self._metrics |= report.metrics
        return self._metrics


def numbers(report: Report, shown: Mapping[str, float]) -> str:
    """Return loss, metrics, learning rate and speed, in one line.

    Args:
        report: the report of an update.
        shown: the metrics of the update, possibly with metrics of other phases.
    """
    late = ""
    if any(report.stale):
        late += f"  staleness {report.staleness}"
    if any(report.dropped):
        late += f"  dropped {sum(report.dropped):,}"
    speed = f"{report.examples_per_s:,.0f} examples/s"
    rates = " ".join(f"{rate:.3g}" for rate in report.lrs or [report.lr])
    return f"{metrics(shown)}  lr {rates}{late}  {speed}"


def metrics(values: Mapping[str, float]) -> str:
    """Return metrics in one line: ``loss 0.3127  accuracy 0.8871``."""
    return "  ".join(f"{name} {in_four_places(value)}" for name, value in values.items())
