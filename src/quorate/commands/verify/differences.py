"""The first difference between two recordings of one script, in the order of causes.

Pure. The comparison is of the trained state: parameters and buffers after each update. In the first
differing update, the cause is searched in this order: the rows of a shard, their content, the batch
made of the rows, inputs and outputs of modules in the order of calls, the loss, the gradient on the
backward pass, the gradient of each parameter; and if all shards are equal, the update itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from quorate.commands.verify.records import Recording, ShardRecord, StepRecord
from quorate.replica.witness.module_trace import Event

# Causes.
WEIGHTS = "weights"  # the model is made with different weights
RESTORED = "restored"  # a resumed run begins with a different state than the saved run's
ROWS = "rows"  # a shard consists of different rows
ROW = "row"  # a row of the dataset has different content
BATCH = "batch"  # the same rows give a different batch
MODULE = "module"  # a module returned a different output for the same input
BETWEEN = "between"  # a module received a different input after equal outputs
CALLS = "calls"  # different modules were called
LOSS = "loss"  # the loss or a metric differs after equal outputs of all modules
BACKWARD = "backward"  # the gradient differs on the backward pass
GRADIENT = "gradient"  # the gradient of a parameter differs after an equal backward pass
BUFFERS = "buffers"  # the buffers of a module differ
STAGES = "stages"  # stages give different shards, while one piece gives equal shards
UPDATE = "update"  # the update differs for equal gradients
RATE = "rate"  # the next learning rate differs after an equal update
LENGTH = "length"  # one run made fewer updates


@dataclass(frozen=True)
class RowSighting:
    """The computation of a row: where and when."""

    row: int
    worker: int
    step: int
    shard: int


@dataclass(frozen=True)
class Difference:
    """The first difference between two runs."""

    cause: str
    update: int  # from 1; 0: before the first
    shard: int | None = None
    workers: tuple[int, int] | None = None  # the workers of the shard in each run
    row: int | None = None
    seen: tuple[RowSighting, ...] = ()  # rows of the same run with the same content
    module: str | None = None  # "" is the model itself
    kind: str = ""  # the module's class
    after: str | None = None  # the last module with equal outputs
    metric: str | None = None
    parameter: str | None = None  # the first with a different gradient, or with different values
    parameters: int = 0  # number of differing parameters
    shards: int = 0  # number of differing shards in the update
    rates: tuple[float, float] | None = None  # the first learning rates that differ


def first_difference(first: Recording, second: Recording) -> Difference | None:
    """Return the first difference of two runs; None if the bits are equal after each update."""
    for place, (a, b) in enumerate(zip(first.updates, second.updates, strict=False)):
        names = list(_differing(a.tensors, b.tensors))
        pairs = zip(a.lrs, b.lrs, strict=True)
        rates = next((pair for pair in pairs if repr(pair[0]) != repr(pair[1])), None)
        if not names and rates is None and not _loss_differs(first, second, a.step):
            continue
        if a.number == 0 and names:
            return Difference(WEIGHTS, 0, parameter=names[0], parameters=len(names))
        if place == 0 and names:
            return Difference(RESTORED, a.number, parameter=names[0], parameters=len(names))
        in_shards = _in_shards((first, a), (second, b))
        if in_shards is None and not names:
            return Difference(RATE, a.number, rates=rates)
        if in_shards is None:
            cause = STAGES if _is_of_stages(first, second, a.step) else UPDATE
            return Difference(cause, a.number, parameter=names[0], parameters=len(names))
        return in_shards
    if len(first.updates) != len(second.updates):
        shorter = min(first.updates, second.updates, key=len)
        return Difference(LENGTH, shorter[-1].number + 1 if shorter else 0)
    return None


def changed_rows(first: Recording, second: Recording) -> list[int]:
    """Return the rows of the dataset whose content differs between the runs."""
    rows: set[int] = set()
    for ticket in first.shards.keys() & second.shards.keys():
        a, b = first.shards[ticket][0], second.shards[ticket][0]
        pairs = zip(a.rows, a.samples, b.rows, b.samples, strict=False)
        rows |= {row for row, text, again, changed in pairs if row == again and text != changed}
    return sorted(rows)


def alike(run: Recording) -> list[tuple[RowSighting, RowSighting]]:
    """Return pairs of rows in an epoch of a run with equal content, each after the earlier row."""
    steps = max(1, int(run.facts.get("steps_per_epoch", 1)))
    first: dict[tuple[int, str], RowSighting] = {}
    pairs = []
    for step, shard in sorted(run.shards):
        record = run.shards[step, shard][0]
        for row, text in zip(record.rows, record.samples, strict=True):
            here = RowSighting(row, record.worker, step, shard)
            before = first.setdefault((step // steps, text), here)
            if before.row != row:
                pairs.append((before, here))
    return pairs


def _is_of_stages(first: Recording, second: Recording, step: int) -> bool:
    """Return whether stages and one piece computed a shard of a step differently, in either run."""
    return any(t.in_stages and t.step == step for run in (first, second) for t in run.twice)


def _loss_differs(first: Recording, second: Recording, step: int) -> bool:
    # Compare only the loss: a metric need not be a function of the data (seconds, say).
    for ticket in first.shards.keys() & second.shards.keys():
        if ticket[0] == step:
            mine, theirs = ({_loss(s) for s in run.shards[ticket]} for run in (first, second))
            if not mine & theirs:
                return True
    return False


def _loss(record: ShardRecord) -> tuple[str, ...]:
    return tuple(repr(record.metrics.get(name)) for name in ("loss", "weight"))


def _in_shards(
    first: tuple[Recording, StepRecord], second: tuple[Recording, StepRecord]
) -> Difference | None:
    update, step = first[1].number, first[1].step
    parted = []
    for ticket in sorted(first[0].shards.keys() | second[0].shards.keys()):
        if ticket[0] != step:
            continue
        pairs = list(product(_counted(*first, ticket), _counted(*second, ticket)))
        partings = [_parting(a, b, update) for a, b in pairs]
        if partings and all(p is not None for p in partings):
            parted.append((partings[0], pairs[0]))
    if not parted:
        return None
    difference, (a, b) = parted[0]
    assert difference is not None
    seen: tuple[RowSighting, ...] = ()
    if difference.row is not None:
        at = b.rows.index(difference.row)
        seen = tuple(_sightings(second[0], b.samples[at], difference.row))
        seen = seen or tuple(_sightings(first[0], a.samples[at], difference.row))
    names = list(_differing(a.gradient, b.gradient))
    return _with(difference, a, b, names, seen, len(parted))


def _counted(run: Recording, update: StepRecord, ticket: tuple[int, int]) -> list[ShardRecord]:
    """Return the computations of a shard that entered the update; all of them if unknown.

    Of several by the same worker number the last counts: a killed worker may have recorded a result
    without sending it, and its replacement has the same number.
    """
    copies = run.shards.get(ticket, [])
    mine = [record for record in copies if record.worker == update.computed_by.get(ticket[1])]
    return mine[-1:] or copies


def _with(
    difference: Difference,
    a: ShardRecord,
    b: ShardRecord,
    names: Sequence[str],
    seen: tuple[RowSighting, ...],
    shards: int,
) -> Difference:
    return Difference(
        **{
            **vars(difference),
            "shard": a.shard,
            "workers": (a.worker, b.worker),
            "parameter": next(iter(names), None),
            "parameters": len(names),
            "seen": seen,
            "shards": shards,
        }
    )


def _sightings(run: Recording, text: str, but: int) -> Iterator[RowSighting]:
    for (step, shard), records in sorted(run.shards.items()):
        for record in records:
            for row, held in zip(record.rows, record.samples, strict=True):
                if held == text and row != but:
                    yield RowSighting(row, record.worker, step, shard)


def _parting(a: ShardRecord, b: ShardRecord, update: int) -> Difference | None:
    """Return the first difference of two computations of a shard, in the order of causes."""
    if a.rows != b.rows:
        return Difference(ROWS, update)
    for row, text, changed in zip(a.rows, a.samples, b.samples, strict=True):
        if text != changed:
            return Difference(ROW, update, row=row)
    if a.batch != b.batch:
        return Difference(BATCH, update)
    if (difference := _forward(a.forward, b.forward, update)) is not None:
        return difference
    for name in _differing(a.metrics, b.metrics):
        return Difference(LOSS, update, metric=name)
    if (event := _backward(a.backward, b.backward)) is not None:
        return Difference(BACKWARD, update, module=event.path, kind=event.kind)
    if any(_differing(a.gradient, b.gradient)):
        return Difference(GRADIENT, update)
    return None if a.buffers == b.buffers else Difference(BUFFERS, update)


def _forward(a: Sequence[Event], b: Sequence[Event], update: int) -> Difference | None:
    after: Event | None = None
    for mine, theirs in zip(a, b, strict=False):
        if (mine.what, mine.path) != (theirs.what, theirs.path):
            return Difference(
                CALLS, update, module=theirs.path, kind=theirs.kind, after=_path(after)
            )
        if mine.hash != theirs.hash:
            cause = MODULE if mine.what == "out" else BETWEEN
            return Difference(cause, update, module=mine.path, kind=mine.kind, after=_path(after))
        if mine.what == "out":
            after = mine
    if len(a) != len(b):
        more = max(a, b, key=len)[min(len(a), len(b))]
        return Difference(CALLS, update, module=more.path, kind=more.kind, after=_path(after))
    return None


def _path(event: Event | None) -> str | None:
    return None if event is None else event.path


def _backward(a: Sequence[Event], b: Sequence[Event]) -> Event | None:
    theirs = {(event.path, event.number): event.hash for event in b}
    return next((e for e in a if theirs.get((e.path, e.number)) != e.hash), None)


def _differing(a: Mapping[str, object], b: Mapping[str, object]) -> Iterator[str]:
    """Yield the names with different values, in the order of the first mapping."""
    yield from (name for name, value in a.items() if repr(b.get(name)) != repr(value))
    yield from (name for name in b if name not in a)
