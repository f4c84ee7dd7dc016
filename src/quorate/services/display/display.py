"""The display: the progress of a run, as a live bar on a terminal, as lines elsewhere.

On a terminal, a live view has a bar, the newest numbers and the table of workers. On a narrow
terminal, the numbers move below the bar, and columns of the table are dropped, the least important
first. No text is cut in the middle.
"""

from __future__ import annotations

import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TextIO, cast

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from quorate.engines.worker_status import WorkerStatus
from quorate.machine.standard_streams import Steady
from quorate.machine.text import aligned, in_four_places
from quorate.services.device_use import DeviceUse
from quorate.services.display.shard_time import duration, shard_time
from quorate.services.display.shown import DATED, JSON, OutputSettings, clock
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


# --- the table of workers -------------------------------------------------------------------------

COLUMNS = ("worker", "device", "use", "memory", "shard", "waiting", "state")
LONG = 3.0  # a state is long, and its duration shown, after so many shard times of the worker
LONG_UNKNOWN_S = 10.0  # the same threshold while the shard time is unknown
LEAST_LONG_S = 1.0

Row = tuple[str, ...]  # a cell for each of COLUMNS


class WorkerRows:
    """The rows of the table for successive statuses of all workers. One thread.

    Shard times and shares of time cover the time since the previous call.
    """

    def __init__(self) -> None:
        self._before: dict[int, WorkerStatus] = {}
        self._shard_s: dict[int, float] = {}  # the last known: there may be no new time

    def rows(
        self, workers: Sequence[WorkerStatus], uses: Sequence[DeviceUse], now: float
    ) -> list[Row]:
        """Return a row per worker.

        Args:
            now: time.monotonic().
        """
        use_of = {use.worker: use for use in uses}
        return [self._row(status, use_of.get(status.number), now) for status in workers]

    def _row(self, status: WorkerStatus, use: DeviceUse | None, now: float) -> Row:
        number = status.number
        time = shard_time(self._before.get(number), status)
        self._before[number] = status
        if time.shard_s is not None:
            self._shard_s[number] = time.shard_s
        shard_s = self._shard_s.get(number)
        return (
            str(number),
            _device(status, use),
            "" if use is None else _use(use),
            "" if use is None else _memory(use),
            "" if shard_s is None else duration(shard_s),
            "" if time.waiting is None else f"{time.waiting:.0%}",
            _state(status, shard_s, now),
        )


def plain(rows: Sequence[Row]) -> str:
    """Return the table for a file, as lines."""
    return aligned([COLUMNS, *rows])


def _state(status: WorkerStatus, shard_s: float | None, now: float) -> str:
    # A worker without a shard so far is starting: its process may exist without being known yet.
    phase = "gone" if status.is_gone and status.shards else status.phase
    long_s = LONG_UNKNOWN_S if shard_s is None else max(LEAST_LONG_S, LONG * shard_s)
    lasted_s = now - status.since
    return f"{phase} for {duration(lasted_s)}" if lasted_s > long_s else phase


def _device(status: WorkerStatus, use: DeviceUse | None) -> str:
    if use is None or use.physical is None:
        return status.where
    return f"{status.where} = {use.physical}"


def _use(use: DeviceUse) -> str:
    if use.use is None:
        return ""
    if use.device.startswith("cpu"):
        return f"{use.use:.1f} core{'' if 0.95 <= use.use < 1.05 else 's'}"
    return f"{use.use:.0%}"


def _memory(use: DeviceUse) -> str:
    if use.memory_bytes is None:
        return ""
    if use.memory_total_bytes is None:
        return f"{use.memory_bytes / (1 << 20):,.0f} MiB"
    gib = 1 << 30
    return f"{use.memory_bytes / gib:.1f} of {use.memory_total_bytes / gib:.0f} GiB"


# --- the live view of a terminal ------------------------------------------------------------------

GAP = "  "
LEAST_BAR, MOST_BAR = 10, 40  # columns
FIRST_LEFT_OUT = ("memory", "use", "waiting", "shard", "device")  # of the table's columns


class LiveView:
    """The content of the live view. One thread changes the content while another may draw it."""

    def __init__(self) -> None:
        self._shown: tuple[str, str, str, int, int] | None = None
        self._rows: Sequence[Row] = ()
        self._folded_at = 0  # the widest terminal found too narrow: numbers vary in length

    def update(self, position: str, numbers: str, eta: str, completed: int, total: int) -> None:
        """Show an update.

        Args:
            position: ``epoch 1/3  step 300/705``.
            numbers: metrics and speed of the update, separated by two spaces.
            eta: the remaining time; empty if unknown.
            completed: updates so far.
            total: updates in all.
        """
        self._shown = position, numbers, eta, completed, total

    def workers(self, rows: Sequence[Row]) -> None:
        """Show a table of workers below the bar."""
        self._rows = rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        if self._shown is not None:
            yield from self._lines(*self._shown, width)
        if self._rows:
            yield table(self._rows, width)

    def _lines(
        self, position: str, numbers: str, eta: str, completed: int, total: int, width: int
    ) -> Iterator[RenderableType]:
        texts = [text for text in (position, numbers, eta) if text]
        left = width - sum(cell_len(text) + len(GAP) for text in texts)
        if left < LEAST_BAR:
            self._folded_at = max(self._folded_at, width)
        if width > self._folded_at:
            yield _beside(position, _bar(completed, total, left), numbers, eta)
            return
        left = width - sum(cell_len(text) + len(GAP) for text in (position, eta) if text)
        if left >= LEAST_BAR:
            yield _beside(position, _bar(completed, total, left), eta)
        else:
            yield from wrapped(GAP.join(text for text in (position, eta) if text), width)
        yield from wrapped(numbers, width)


def table(rows: Sequence[Row], width: int) -> Table:
    """Return the table of workers, with as many columns as fit."""
    kept = [name for number, name in enumerate(COLUMNS) if any(row[number] for row in rows)]
    for name in FIRST_LEFT_OUT:
        if _width_of(rows, kept) <= width:
            break
        if name in kept:
            kept.remove(name)
    shown = Table(box=None, pad_edge=False, header_style="dim")
    for name in kept:
        shown.add_column(name, no_wrap=True)
    for row in rows:
        shown.add_row(*(Text(row[COLUMNS.index(name)]) for name in kept))
    return shown


def wrapped(text: str, width: int) -> Iterator[Text]:
    """Yield the lines of a text, broken only between its parts."""
    line = ""
    for part in text.split(GAP):
        longer = f"{line}{GAP}{part}" if line else part
        if line and cell_len(longer) > width:
            yield Text(line, no_wrap=True, overflow="ellipsis")
            longer = part
        line = longer
    yield Text(line, no_wrap=True, overflow="ellipsis")


def _width_of(rows: Sequence[Row], names: Sequence[str]) -> int:
    numbers = [COLUMNS.index(name) for name in names]
    widest = (max(cell_len(row[number]) for row in [COLUMNS, *rows]) for number in numbers)
    return sum(widest) + len(GAP) * (len(names) - 1)


def _bar(completed: int, total: int, width: int) -> ProgressBar:
    return ProgressBar(total=total, completed=completed, width=min(width, MOST_BAR))


def _beside(*parts: str | ProgressBar) -> Table:
    grid = Table.grid(padding=(0, len(GAP)))
    shown = [Text(part, no_wrap=True) if isinstance(part, str) else part for part in parts if part]
    grid.add_row(*shown)
    return grid
