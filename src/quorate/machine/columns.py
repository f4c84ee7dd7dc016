"""Columns of text, for a terminal or a file."""

from __future__ import annotations

from collections.abc import Container, Sequence

MOST_IN_FULL = 1e12  # of which a float has four places: 1e308 has 309 digits before them


def aligned(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> str:
    """Return rows of cells as lines with a column below the other, two spaces apart.

    Args:
        rows: All with the same number of cells.
        right: Which columns end, and do not begin, below each other; from 0.
    """
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def in_three_digits(value: float) -> str:
    """Return a measured number with three digits: ``41,700``, ``1.25``, ``0.0042``."""
    if not 1e-4 <= abs(value) < MOST_IN_FULL:
        return f"{value:.3g}"
    rounded = float(f"{value:.3g}")
    return f"{rounded:,.0f}" if abs(rounded) >= 100 else f"{value:.3g}"


def in_four_places(value: float) -> str:
    """Return a metric with four places: ``0.3127``; ``1.0000e+308`` where it has many digits."""
    return f"{value:.4f}" if not abs(value) >= MOST_IN_FULL else f"{value:.4e}"
