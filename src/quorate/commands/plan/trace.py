"""Traces: the time of a run as recorded in its `metrics.jsonl`, checked line by line."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from quorate.commands.plan.measurements import unread
from quorate.engines.worker_status import PHASES
from quorate.errors import DataError, cure
from quorate.machine.regular_file import regular_lines
from quorate.machine.valid_json import number
from quorate.services.checkpoints.record import MOST_COUNT, parsed_json
from quorate.services.run_directory.log_cut import MOST_LINE_BYTES
from quorate.simulation.inputs import MOST

SPENT = ("shards", *PHASES)
COUNTS = ("epoch", "rows", "dropped_rows", "staleness", "not_finite")
NUMBERS = ("weight", "examples_per_s", "at", "begun_at")
LISTS = ("fresh", "stale", "dropped")
# Fields that are not numbers >= 0. All unlisted fields are metrics: numbers.
OTHERS = ("global_step", "lr", "lrs", "grad_norm", "slow", "doubts", "phase", "spent")
_AGAIN = "mend or remove the line"


class TracedUpdate(NamedTuple):
    """An update of a run."""

    step: int
    at_s: float | None  # seconds since the epoch; None: the line is of an old version
    begun_at_s: float | None  # start of the process, in its first line
    rows: int
    dropped_rows: int
    staleness: int
    workers: int
    spent: dict[str, list[float]] | None  # by ``SPENT``, then by worker, since the process began
    is_after_evaluation: bool


def read_trace(path: Path) -> list[TracedUpdate]:
    """Return the updates of a run.

    Args:
        path: path of ``metrics.jsonl``.

    Raises:
        DataError: the file is missing, or has an invalid value; with the line.
    """
    lines: list[TracedUpdate] = []
    evaluated = False
    for place, words in enumerate(_lines_of(path), 1):
        where = f"{path}, line {place}"
        record = _object(where, words)
        step = record["global_step"]
        if "validation" in record:
            evaluated = True
            continue
        line = _line(where, record, is_after_evaluation=evaluated)
        before = lines[-1] if lines else None
        if before is not None and step <= before.step:
            expected = f"a later one than {before.step}"
            raise DataError(where, got=f"global_step {step}", expected=expected, fix=_AGAIN)
        if before is not None and line.begun_at_s is None:
            _require_later(where, before.at_s, line.at_s)
        lines.append(line)
        evaluated = False
    if not lines:
        raise DataError(path, got="no update", expected="a line per update", fix="train first")
    return lines


def _lines_of(path: Path) -> Iterator[bytes]:
    expected = "the metrics.jsonl of a run"
    try:
        yield from regular_lines(path, MOST_LINE_BYTES)
    except OSError as error:
        raise unread(path, error, expected) from None


def _object(where: str, words: bytes) -> dict[str, Any]:
    try:
        record = parsed_json(words)
    except ValueError:
        record = None
    if not words.endswith(b"\n"):
        fix = "the run was cut off there: go on with it, or remove the line"
        raise DataError(where, got="a line without an end", expected="a whole one", fix=fix)
    step = record.get("global_step") if isinstance(record, dict) else None
    if type(step) is not int or not 0 <= step <= MOST_COUNT:
        shown = (
            "no JSON object"
            if not isinstance(record, dict)
            else f"global_step {json.dumps(step)[:40]}"
        )
        raise DataError(where, got=shown, expected="a line of metrics.jsonl", fix=_AGAIN)
    return dict(record)


def _line(where: str, record: dict[str, Any], *, is_after_evaluation: bool) -> TracedUpdate:
    for name in COUNTS:
        _number(where, record, name, whole=True)
    for name in NUMBERS:
        if name in record:
            _number(where, record, name)
    workers = {len(_numbers(where, record, name)) for name in LISTS}
    if len(workers) != 1:
        got = f"{' and '.join(map(str, sorted(workers)))} workers"
        raise DataError(where, got=got, expected="as many in fresh, stale, dropped", fix=_AGAIN)
    known = (*COUNTS, *NUMBERS, *LISTS, *OTHERS)
    for name, value in record.items():
        if name not in known and number(value) is None:
            fix = cure(name, known, "leave it out")
            got = f"column {name!r}, {json.dumps(value)[:40]}"
            raise DataError(where, got=got, expected="a number, if it is a metric", fix=fix)
    (count,) = workers
    return TracedUpdate(
        step=record["global_step"],
        at_s=record.get("at"),
        begun_at_s=record.get("begun_at"),
        rows=record["rows"],
        dropped_rows=record["dropped_rows"],
        staleness=record["staleness"],
        workers=count,
        spent=_spent(where, record, count),
        is_after_evaluation=is_after_evaluation,
    )


def _spent(where: str, record: dict[str, Any], workers: int) -> dict[str, list[float]] | None:
    if "spent" not in record:
        return None
    spent = record["spent"]
    if not isinstance(spent, dict):
        raise DataError(where, got=f"spent {json.dumps(spent)[:40]}", expected="phases", fix=_AGAIN)
    for name in spent:
        if name not in SPENT:
            fix = cure(name, SPENT, "leave it out")
            got = f"column {name!r} in spent"
            raise DataError(where, got=got, expected=", ".join(SPENT), fix=fix)
    for name in SPENT:
        if len(_numbers(where, spent, name)) != workers:
            expected = f"a number for each of {workers} workers"
            raise DataError(where, got=f"{name} of others", expected=expected, fix=_AGAIN)
    return spent


def _number(where: str, record: dict[str, Any], name: str, *, whole: bool = False) -> float:
    value = record.get(name)
    expected = "a whole number >= 0" if whole else "a number >= 0"
    is_number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    # The weight of shards is not used by a plan, and may have any size.
    most = sys.float_info.max if name == "weight" else MOST
    if not is_number or not 0 <= value <= most:  # type: ignore[operator]
        got = f"{name} {json.dumps(value)[:40]}" if name in record else f"no {name}"
        raise DataError(where, got=got, expected=expected, fix=_AGAIN)
    return float(value)  # type: ignore[arg-type]


def _numbers(where: str, record: dict[str, Any], name: str) -> Sequence[float]:
    values = record.get(name)
    if not isinstance(values, list):
        got = f"{name} {json.dumps(values)[:40]}" if name in record else f"no {name}"
        raise DataError(where, got=got, expected="a number per worker", fix=_AGAIN)
    return [_number(where, {name: value}, name) for value in values]


def _require_later(where: str, before_s: float | None, at_s: float | None) -> None:
    if (before_s is None) != (at_s is None):
        raise DataError(where, got="at in some lines", expected="in all or none", fix=_AGAIN)
    if before_s is not None and at_s is not None and at_s < before_s:
        expected = f"no earlier one than {before_s}"
        raise DataError(where, got=f"at {at_s}", expected=expected, fix=_AGAIN)
