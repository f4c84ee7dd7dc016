"""Columns of text, for a terminal or a file."""

from __future__ import annotations

from collections.abc import Container, Sequence


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
