"""The history of a run from the run directory: updates, evaluations, events, checkpoints.

Files may be damaged, cut off, or written by another program. Invalid lines are counted and left
out.
"""

from __future__ import annotations

import dataclasses
import json
import math
from array import array
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from quorate.commands.run_facts import MARKS, RunFacts, runs_below
from quorate.coordination import rules
from quorate.coordination.run_event import WARNING
from quorate.engines.worker_status import PHASES
from quorate.errors import CheckpointError, SettingError, UserError
from quorate.machine.regular_file import open_regular, size_of
from quorate.machine.text import printable
from quorate.machine.valid_json import number
from quorate.services.checkpoints import files
from quorate.services.checkpoints.record import MOST_COUNT
from quorate.services.report import Report
from quorate.services.run_directory.logs import EVENT_LOG, TIMES

MOST_LINE_BYTES = 4 << 20
MOST_BYTES = 1 << 30  # of a log; only the end of a larger log is read
MOST_METRICS = 64  # names of metrics to read
MOST_EVENTS = 100_000
MOST_NAME, MOST_TEXT = 80, 2000  # characters

# Fields of an update's line that have no curve.
NOT_DRAWN = {field.name for field in dataclasses.fields(Report)} | {*TIMES, "slow"}
NOT_DRAWN -= {"lr", "examples_per_s", "grad_norm"}


class EvaluationRecord(NamedTuple):
    """An evaluation of the validation set."""

    global_step: int
    row: int  # number of updates in the log before the evaluation
    at: float  # seconds since the epoch, or nan
    metrics: dict[str, float]


class PhaseTimes(NamedTuple):
    """The time of each worker by phase, since the start of a fit."""

    row: int  # number of updates in the log before the note; -1: the figures of an event
    at: float  # seconds since the epoch, or nan
    shards: list[float]  # by worker
    seconds: dict[str, list[float]]  # by phase, then by worker


class EventLine(NamedTuple):
    """A line of events.jsonl."""

    at: float  # seconds since the epoch
    global_step: int
    kind: str
    text: str
    worker: int | None
    more: dict[str, Any]  # further entries


class CheckpointFacts(NamedTuple):
    """A checkpoint whose record was read."""

    path: Path
    global_step: int
    nbytes: int
    saved_at: float | None
    record: dict[str, Any] | None  # None: damaged
    wrong: str


@dataclass
class Curve:
    """A figure of the updates that contain the figure. K values."""

    rows: array[int] = field(default_factory=lambda: array("q"))  # (K,) positions among the updates
    values: array[float] = field(default_factory=lambda: array("d"))  # (K,)


@dataclass
class LoggedUpdates:
    """The lines of metrics.jsonl. R updates."""

    steps: array[int] = field(default_factory=lambda: array("q"))  # (R,)
    at: array[float] = field(default_factory=lambda: array("d"))  # (R,) nan: unknown
    begins: list[tuple[int, float]] = field(default_factory=list)  # (row, time) of each fit's start
    curves: dict[str, Curve] = field(default_factory=dict)  # by metric, "lr", "examples_per_s"
    evaluations: list[EvaluationRecord] = field(default_factory=list)
    spent: list[PhaseTimes] = field(default_factory=list)
    newest: dict[str, Any] = field(default_factory=dict)  # the last line of an update
    rows: int = 0  # rows of the dataset in all updates
    damaged: int = 0  # number of lines
    skipped_bytes: int = 0  # bytes skipped at the start of a very long log
    left_out: int = 0  # values of metrics beyond MOST_METRICS

    def fates(self, name: str) -> list[int]:
        """Return each worker's number of "stale" or "dropped" shards."""
        return _counts(self.newest.get(name)) or []


class RunHistory(NamedTuple):
    """The history of a run."""

    run_dir: Path
    facts: RunFacts
    updates: LoggedUpdates
    events: list[EventLine]
    damaged_events: int
    checkpoints: list[CheckpointFacts]  # the newest first
    digest: WeightsDigest | None  # of the newest sound checkpoint

    @property
    def record(self) -> dict[str, Any]:
        """The newest readable record of a checkpoint; empty without one."""
        records = (each.record for each in self.checkpoints if each.record is not None)
        return next(records, {})

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the newest fit: from its start event, else from the newest checkpoint."""
        settings: dict[str, Any] = {}
        for event in self.events:
            found = event.more.get("settings")
            if isinstance(found, dict):
                settings = found
        record = self.record
        of_record = {name: record[name] for name in SETTINGS if name in record}
        return {**of_record, **settings}

    @property
    def command(self) -> list[str]:
        """The script and arguments of the newest fit; empty if unknown."""
        for event in reversed(self.events):
            words = event.more.get("command")
            if isinstance(words, list) and words:
                return [printable(word, MOST_TEXT) for word in words]
        return []

    @property
    def doubts(self) -> list[str] | None:
        """The reasons why bits may depend on the number of workers; None: not in a checkpoint."""
        record = self.record
        if not isinstance(record.get("doubts"), list):
            return None
        doubts = [printable(doubt, MOST_TEXT) for doubt in record["doubts"]]
        if not rules.keeps_bits(rules.parse(record["update"]), record["shards"]):
            doubts.insert(0, f"update={record['update']}: the result depends on timing")
        return doubts

    @property
    def losses(self) -> list[str]:
        """The names of the losses: "loss", or one of each phase, "d/loss"."""
        return [name for name in self.updates.curves if is_loss(name)]


class WeightsDigest(NamedTuple):
    """The digest of the weights of a verified checkpoint."""

    global_step: int
    weights: str
    averaged: str | None


# Entries of a checkpoint's record that are settings of the run.
SETTINGS = (
    *("batch_size", "shards", "seed", "update", "precision", "threads", "compile"),
    *("deterministic", "is_augmented", "is_ordered", "sampling", "last", "clip_norm"),
    *("ema_decay", "rows", "shuffle", "sampled_rows", "last_step", "kernels", "random", "schedule"),
    *("engine", "devices", "device_types", "processors", "workers", "torch", "python"),
)


def is_loss(name: str) -> bool:
    """Return whether a metric is a loss."""
    return name == "loss" or name.endswith("/loss")


def run_history(run_dir: Path) -> RunHistory:
    """Read a run directory.

    Raises:
        SettingError: the directory is not a run directory, or cannot be read.
    """
    try:
        found = {path.name for path in run_dir.iterdir()}
    except OSError as error:
        fix = f"{error.strerror or error}: check the path"
        raise SettingError("RUN_DIR", str(run_dir), "a run directory", fix) from error
    if not found & {*MARKS}:
        fix = "name a folder with metrics.jsonl or checkpoints; quorate runs FOLDER lists them"
        raise SettingError("RUN_DIR", str(run_dir), "a run directory", fix)
    (facts,) = runs_below(run_dir).runs
    events, damaged = read_events(run_dir / EVENT_LOG)
    checkpoints = read_checkpoints(run_dir)
    return RunHistory(
        run_dir,
        facts,
        read_updates(run_dir / "metrics.jsonl"),
        events,
        damaged,
        checkpoints,
        newest_digest(checkpoints),
    )


# --- metrics.jsonl --------------------------------------------------------------------------------


def read_updates(path: Path) -> LoggedUpdates:
    """Read metrics.jsonl; an unreadable file has no updates."""
    updates = LoggedUpdates()
    try:
        updates.skipped_bytes = max(0, path.stat().st_size - MOST_BYTES)
        for record in _records(path, updates.skipped_bytes):
            if record is None or not _add(updates, record):
                updates.damaged += 1
    except OSError:
        pass
    updates.curves = {printable(name, MOST_NAME): c for name, c in updates.curves.items()}
    return updates


def _records(path: Path, begin: int) -> Iterator[dict[str, Any] | None]:
    """Yield the objects in a file of lines of JSON; None for each invalid line.

    A partial line at the end of the file, the usual effect of a kill, is ignored.
    """
    decode = msgspec.json.Decoder(dict[str, Any]).decode
    with open_regular(path) as file:
        size = size_of(file)
        file.seek(begin)
        if begin:
            file.readline(MOST_LINE_BYTES)
        left = size - file.tell()  # the run may append to the file
        while left > 0 and (line := file.readline(MOST_LINE_BYTES)):
            left -= len(line)
            try:
                yield decode(line)
                continue
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                pass
            try:
                record = json.loads(line)  # NaN without quotes, of older versions
            except (ValueError, RecursionError):
                record = None
            if isinstance(record, dict):
                yield record
            elif line.endswith(b"\n"):
                yield None


def _step(record: dict[str, Any]) -> int | None:
    step = record.get("global_step")
    return step if type(step) is int and 0 <= step <= MOST_COUNT else None


def _at(record: dict[str, Any]) -> float:
    at = number(record.get("at"))
    return at if at is not None and 0 <= at < 1e11 else math.nan


def _add(updates: LoggedUpdates, record: dict[str, Any]) -> bool:
    """Add a line; return whether the line is an update or an evaluation."""
    step, at = _step(record), _at(record)
    if step is None:
        return False
    row = len(updates.steps)
    if "validation" in record:
        found = record["validation"]
        if not isinstance(found, dict):
            return False
        values = {printable(n, MOST_NAME): number(v) for n, v in [*found.items()][:MOST_METRICS]}
        known = {name: value for name, value in values.items() if value is not None}
        updates.evaluations.append(EvaluationRecord(step, row, at, known))
        return True
    begun_at = number(record.get("begun_at"))
    if begun_at is not None and 0 <= begun_at < 1e11:
        updates.begins.append((row, begun_at))
    updates.steps.append(step)
    updates.at.append(at)
    rows = record.get("rows")
    updates.rows += rows if type(rows) is int and 0 <= rows <= MOST_COUNT else 0
    for name, value in record.items():
        if name in NOT_DRAWN:
            continue
        figure = value if type(value) is float else number(value)
        if figure is None:
            continue
        curve = updates.curves.get(name)
        if curve is None:
            if len(updates.curves) >= MOST_METRICS or len(name) > MOST_NAME:
                updates.left_out += 1
                continue
            curve = updates.curves[name] = Curve()
        curve.rows.append(row)
        curve.values.append(figure)
    updates.newest = record
    if "spent" in record and (spent := _spent(record["spent"], row, at)) is not None:
        updates.spent.append(spent)
    return True


def _counts(value: Any) -> list[int] | None:
    if isinstance(value, list) and all(type(n) is int and 0 <= n <= MOST_COUNT for n in value):
        return value
    return None


def _spent(value: Any, row: int, at: float) -> PhaseTimes | None:
    if not isinstance(value, dict):
        return None
    columns = {name: value.get(name) for name in ("shards", *PHASES)}
    read: dict[str, list[float]] = {}
    for name, column in columns.items():
        if not isinstance(column, list):
            return None
        figures = [number(figure) for figure in column]
        read[name] = [f for f in figures if f is not None and 0 <= f < math.inf]
        if len(read[name]) != len(column) or len(column) != len(columns["shards"] or ()):
            return None
    return PhaseTimes(row, at, read.pop("shards"), read)


# --- events.jsonl ---------------------------------------------------------------------------------


def read_events(path: Path) -> tuple[list[EventLine], int]:
    """Read events.jsonl; return the events, and the number of lines damaged or left out."""
    events: list[EventLine] = []
    damaged = 0
    try:
        begin = max(0, path.stat().st_size - MOST_BYTES)
        for record in _records(path, begin):
            event = None if record is None else _event(record)
            if event is None or len(events) >= MOST_EVENTS:
                damaged += 1
            else:
                events.append(event)
    except OSError:
        pass
    return events, damaged


def _event(record: dict[str, Any]) -> EventLine | None:
    step, at = _step(record), _at(record)
    if step is None or math.isnan(at):
        return None
    worker = record.get("worker")
    worker = worker if type(worker) is int and 0 <= worker <= MOST_COUNT else None
    kind, text = record.get("kind", WARNING), record.get("text", "")
    known = ("at", "global_step", "kind", "text", "worker")
    more = {name: value for name, value in record.items() if name not in known}
    return EventLine(at, step, printable(kind, MOST_NAME), printable(text, MOST_TEXT), worker, more)


def spent_at_end(event: EventLine) -> PhaseTimes | None:
    """Return the workers' time in the end event of a fit."""
    return _spent(event.more.get("spent"), -1, event.at)


# --- checkpoints ----------------------------------------------------------------------------------


def read_checkpoints(run_dir: Path) -> list[CheckpointFacts]:
    """Read the records of all checkpoints, the newest first. Tensors are not read."""
    checkpoints = []
    try:
        listed = files.newest_first(run_dir)
    except (UserError, OSError):
        return []
    for path, step in listed:
        record, wrong = None, ""
        try:
            record = files.record_of(path)
        except CheckpointError as error:
            wrong = printable(error, MOST_TEXT)
        nbytes = 0
        with suppress(OSError):
            nbytes = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
        saved_at = None if record is None else record["saved_at"]
        checkpoints.append(CheckpointFacts(path, step, nbytes, saved_at, record, wrong))
    return checkpoints


def newest_digest(checkpoints: list[CheckpointFacts]) -> WeightsDigest | None:
    """Return the digest of the newest sound checkpoint; None if there is none."""
    for checkpoint in checkpoints:
        if (digest := digest_of(checkpoint)) is not None:
            return digest
    return None


def digest_of(checkpoint: CheckpointFacts) -> WeightsDigest | None:
    """Verify every byte of a checkpoint, and return its digest; None if damaged."""
    if checkpoint.record is None:
        return None
    path, order = checkpoint.path, checkpoint.record["order"]
    try:
        record = files.check(path, checkpoint.global_step)
        weights = files.digest_of(path, "model.safetensors", order)
        averaged = None
        if "averaged.safetensors" in record["files"]:
            averaged = files.digest_of(path, "averaged.safetensors", order)
    except CheckpointError:
        return None
    return WeightsDigest(checkpoint.global_step, weights, averaged)
