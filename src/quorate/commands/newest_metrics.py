"""The newest metrics of a run, from the end of metrics.jsonl, without torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from quorate.machine.regular_file import open_regular, size_of
from quorate.machine.valid_json import number
from quorate.services.checkpoints.record import MOST_COUNT, parsed_json
from quorate.services.report import Report

BLOCK_BYTES = 1 << 18
MOST_LINE_BYTES = 4 << 20  # a longer line is no line of a run
# Bytes searched for an evaluation: some 200,000 updates, which takes a quarter of a second.
MOST_BYTES = 64 << 20
# Fields of an update's line other than metrics of the loss function.
NO_METRICS = {field.name for field in fields(Report)} | {"at", "begun_at", "spent", "slow"}


class NewestMetrics(NamedTuple):
    """The metrics of one update, or of one evaluation of the validation set."""

    global_step: int
    metrics: dict[str, float]
    phase: str | None = None  # phase of the update, the prefix of its metrics' names

    @property
    def loss(self) -> float | None:
        """The loss; None if the line has no loss."""
        return self.metrics.get("loss" if self.phase is None else f"{self.phase}/loss")


def newest_update(log: Path) -> NewestMetrics | None:
    """Return the newest update in a log; None if the log's last lines have none."""
    for line in _lines_from_the_end(log, BLOCK_BYTES):
        if (record := _record(line)) is not None and "validation" not in record:
            metrics = {name: value for name, value in record.items() if name not in NO_METRICS}
            phase = record.get("phase")
            known = phase if isinstance(phase, str) else None
            return NewestMetrics(record["global_step"], _numbers(metrics), known)
    return None


def newest_validation(log: Path) -> NewestMetrics | None:
    """Return the newest evaluation in a log; None if there is none within ``MOST_BYTES``."""
    for line in _lines_from_the_end(log, MOST_BYTES):
        if b'"validation"' not in line or (record := _record(line)) is None:
            continue
        if isinstance(record.get("validation"), dict):
            return NewestMetrics(record["global_step"], _numbers(record["validation"]))
    return None


def _record(line: bytes) -> dict[str, Any] | None:
    """Return the content of a line; None for a partial line, or a line not of a run."""
    with suppress(ValueError):
        record = parsed_json(line)
        if isinstance(record, dict):
            step = record.get("global_step")
            if type(step) is int and 0 <= step <= MOST_COUNT:
                return record
    return None


def _numbers(values: dict[str, Any]) -> dict[str, float]:
    found = {name: number(value) for name, value in values.items()}
    return {name: value for name, value in found.items() if value is not None}


def _lines_from_the_end(log: Path, most_bytes: int) -> Iterator[bytes]:
    """Yield the lines of a file, the last line first. Unreadable parts are skipped."""
    with suppress(OSError), open_regular(log) as file:
        end = size_of(file)
        stop, rest = max(0, end - most_bytes), b""
        while end > stop and len(rest) <= MOST_LINE_BYTES:
            begin = max(stop, end - BLOCK_BYTES)
            file.seek(begin)
            rest, *lines = (file.read(end - begin) + rest).split(b"\n")
            yield from reversed([line for line in lines if line])
            end = begin
        if end == 0 and rest:
            yield rest
