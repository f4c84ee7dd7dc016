"""Columns of text stand below each other, and no line ends with spaces."""

from __future__ import annotations

from quorate.machine.columns import aligned


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    rows = [("name", "count"), ("a longer one", "3"), ("b", "")]
    assert aligned(rows) == "name          count\na longer one  3\nb"
    assert aligned(rows, right=[1]) == "name          count\na longer one      3\nb"
    assert aligned([]) == ""
