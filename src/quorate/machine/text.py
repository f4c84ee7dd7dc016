"""Text for a terminal: columns, figures, and the escaping of text of unknown origin."""

from __future__ import annotations

from collections.abc import Container, Sequence

MOST_IN_FULL = 1e12  # from here on figures have an exponent: 1e308 has 309 digits before the point


def aligned(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> str:
    """Return rows of cells as lines with aligned columns, two spaces apart.

    Args:
        rows: rows with an equal number of cells.
        right: numbers of the right-aligned columns, from 0.
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
        heads: the heads of all columns.
        rows: rows with as many cells.
        right: as for ``aligned``.
    """
    kept = [column for column in range(len(heads)) if any(row[column] for row in rows)]
    ends = [place for place, column in enumerate(kept) if column in right]
    return aligned([[row[column] for column in kept] for row in (heads, *rows)], right=ends)


def three_digits(value: float) -> str:
    """Return a figure with three significant digits: ``41,700``, ``1.25``, ``0.0042``."""
    if not 1e-4 <= abs(value) < MOST_IN_FULL:
        return f"{value:.3g}"
    rounded = float(f"{value:.3g}")
    return f"{rounded:,.0f}" if abs(rounded) >= 100 else f"{value:.3g}"


def in_four_places(value: float) -> str:
    """Return a metric with four places: ``0.3127``; ``1.0000e+308`` for very large values."""
    return f"{value:.4f}" if not abs(value) >= MOST_IN_FULL else f"{value:.4e}"


MOST_CHARACTERS = 300


def printable(text: object, most: int = MOST_CHARACTERS) -> str:
    """Return a text with its unprintable characters escaped, in the way of ``repr``.

    Escaped are all characters that a terminal would interpret: control characters (a sequence could
    clear the screen, rename the window, type an answer), line ends, marks that change the direction
    of writing, and surrogates, which no terminal's encoding has. Ordinary text of any language is
    unchanged.

    Args:
        text: a text of unknown origin; any other object is converted by ``str``.
        most: greatest number of characters to show. The middle of a longer text is replaced by the
            number of characters left out.
    """
    whole = str(text)
    if len(whole) <= most:
        return _escaped(whole)
    first, last = whole[: most * 2 // 3], whole[len(whole) - most // 3 :]
    left_out = len(whole) - len(first) - len(last)
    return f"{_escaped(first)}... {left_out:,} characters ...{_escaped(last)}"


def _escaped(text: str) -> str:
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def abridged_names(names: Sequence[str], most: int = 4) -> str:
    """Return ``a, b, c and 17 more``."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
