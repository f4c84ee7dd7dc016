"""The books of a run: how often each row was in an update.

Row r adds 16**(r % 11) to metric r // 11, so the digits of the sums over up to 15 epochs show how
often each row was in an update.
"""

import json
from pathlib import Path
from typing import Any

ROWS, DIGITS = 44, 11  # as in the script

Line = dict[str, Any]


def lines_of(run_dir: Path) -> list[Line]:
    """Return the lines of ``metrics.jsonl``, a line for each update."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def times_of_rows(lines: list[Line], rows: int = ROWS) -> list[int]:
    """Return how often each row was in an update: digits to the base of 16 of some sums."""
    digits: list[int] = []
    for n in range(-(-rows // DIGITS)):
        total = round(sum(line[f"sum{n}"] * line["rows"] for line in lines))
        digits += [total // 16**digit % 16 for digit in range(DIGITS)]
    assert not any(digits[rows:])
    return digits[:rows]


def each_row_was_there_once_an_epoch(
    lines: list[Line], epochs: int, most: float, rows: int = ROWS
) -> None:
    """Check the books of rules without drops: ``async``, ``bounded``.

    Args:
        lines: see ``lines_of``.
        epochs: the number of trained epochs.
        most: the bound on staleness.
        rows: of the dataset.
    """
    assert [line["global_step"] for line in lines] == list(range(1, len(lines) + 1))
    assert sum(line["rows"] for line in lines) == epochs * rows
    assert times_of_rows(lines, rows) == [epochs] * rows
    ages = [line["staleness"] for line in lines]
    assert max(ages) <= most
    # The counts go on over a resume.
    assert sum(lines[-1]["stale"]) == sum(age > 0 for age in ages)
    assert sum(lines[-1]["fresh"]) == sum(age == 0 for age in ages)


def a_quorum_was_there_each_time(
    lines: list[Line], epochs: int, quorum: int, rows: int = ROWS
) -> None:
    """Check the books of ``quorum``: drops are accounted for, and nothing is in twice."""
    steps = len(lines) // epochs
    assert [line["global_step"] for line in lines] == list(range(1, epochs * steps + 1))
    assert sum(line["rows"] + line["dropped_rows"] for line in lines) == epochs * rows
    times = times_of_rows(lines, rows)
    assert max(times) <= epochs
    assert sum(times) == sum(line["rows"] for line in lines)
    assert sum(lines[-1]["fresh"]) == quorum * len(lines)
    assert sum(lines[-1]["stale"]) == 0 == max(line["staleness"] for line in lines)
