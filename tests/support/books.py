"""The books of a run of ``scripts/exactly_once.py``: how often each row was in an update."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

ROWS, DIGITS = 44, 11  # as in the script

Line = dict[str, Any]


def lines_of(run_dir: Path) -> list[Line]:
    """Return what ``metrics.jsonl`` has of each update."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def times_of_rows(lines: list[Line]) -> list[int]:
    """Return how often each row was in an update: a digit to the base of 16 in one of four sums."""
    digits: list[int] = []
    for n in range(ROWS // DIGITS):
        total = round(sum(line[f"sum{n}"] * line["rows"] for line in lines))
        digits += [total // 16**digit % 16 for digit in range(DIGITS)]
    return digits


def each_row_was_there_once_an_epoch(lines: list[Line], epochs: int, most: float) -> None:
    """Check the books where nothing is dropped: ``async``, ``bounded``.

    Args:
        most: the bound on staleness.
    """
    assert [line["global_step"] for line in lines] == list(range(1, len(lines) + 1))
    assert sum(line["rows"] for line in lines) == epochs * ROWS
    assert times_of_rows(lines) == [epochs] * ROWS
    ages = [line["staleness"] for line in lines]
    assert max(ages) <= most
    # The counts go on over a resume.
    assert sum(lines[-1]["stale"]) == sum(age > 0 for age in ages)
    assert sum(lines[-1]["fresh"]) == sum(age == 0 for age in ages)


def a_quorum_was_there_each_time(lines: list[Line], epochs: int, quorum: int) -> None:
    """Check the books of ``quorum``: what is dropped is accounted for, and nothing is in twice."""
    steps = len(lines) // epochs
    assert [line["global_step"] for line in lines] == list(range(1, epochs * steps + 1))
    assert sum(line["rows"] + line["dropped_rows"] for line in lines) == epochs * ROWS
    times = times_of_rows(lines)
    assert max(times) <= epochs
    assert sum(times) == sum(line["rows"] for line in lines)
    assert sum(lines[-1]["fresh"]) == quorum * len(lines)
    assert sum(lines[-1]["stale"]) == 0 == max(line["staleness"] for line in lines)


NO_BOUND = math.inf
