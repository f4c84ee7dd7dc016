"""Text for a terminal: columns, figures, and text of unknown origin made fit to be shown."""

from __future__ import annotations

from collections.abc import Container, Sequence

MOST_IN_FULL = 1e12  # of which a float has four places: 1e308 has 309 digits before them


def aligned(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> str:
    """Return rows of cells as lines with a column below the other, two spaces apart.

    Args:
        rows: all with the same number of cells.
        right: numbers of the columns that are aligned at the right, from 0.
    """
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], right: Container[int] = ()) -> str:
    """Return rows below heads, without the columns that are empty in every row.

    Args:
        heads: of all columns.
        rows: each with as many cells.
        right: as for ``aligned``.
    """
    kept = [column for column in range(len(heads)) if any(row[column] for row in rows)]
    ends = [place for place, column in enumerate(kept) if column in right]
    return aligned([[row[column] for column in kept] for row in (heads, *rows)], right=ends)


def three_digits(value: float) -> str:
    """Return a figure with the three digits that it is worth: ``41,700``, ``1.25``, ``0.0042``."""
    if not 1e-4 <= abs(value) < MOST_IN_FULL:
        return f"{value:.3g}"
    rounded = float(f"{value:.3g}")
    return f"{rounded:,.0f}" if abs(rounded) >= 100 else f"{value:.3g}"


def in_four_places(value: float) -> str:
    """Return a metric with four places: ``0.3127``; ``1.0000e+308`` where it has many digits."""
    return f"{value:.4f}" if not abs(value) >= MOST_IN_FULL else f"{value:.4e}"


MOST_CHARACTERS = 300


def printable(text: object, most: int = MOST_CHARACTERS) -> str:
    """Return a text with what is not to be seen in it escaped, as ``repr`` does it.

    What a terminal would obey must not reach it: control characters (a sequence could clear the
    screen, rename the window, type an answer), line ends, marks that turn the direction of writing,
    surrogates, which no terminal's encoding has. Ordinary text of any language stays as it is.

    Args:
        text: of an unknown origin; anything else by its ``str``.
        most: characters of it to show. Of a longer text the middle is left out, and how much that
            is stands in its place.
    """
    whole = str(text)
    if len(whole) <= most:
        return _escaped(whole)
    first, last = whole[: most * 2 // 3], whole[len(whole) - most // 3 :]
    left_out = len(whole) - len(first) - len(last)
    return f"{_escaped(first)}... {left_out:,} characters ...{_escaped(last)}"


def _escaped(text: str) -> str:
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
