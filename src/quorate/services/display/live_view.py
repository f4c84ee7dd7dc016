"""The live view: a bar, the newest numbers and the table of workers, as wide as the terminal.

On a narrow terminal, the numbers move below the bar, and columns of the table are dropped, the
least important first. No text is cut in the middle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from quorate.services.display.worker_rows import COLUMNS, Row

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
