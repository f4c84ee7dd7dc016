"""Where two recordings of one script part, and why: the earliest difference in the order of causes.

Pure. What is compared is what is trained: parameters and buffers after each update. In the update
at which they part, the cause is looked for in this order: the rows of a shard, what they hold, the
batch made of them, what modules are given and return in the order of calls, the loss, the gradient
on its way back, the gradient of each parameter; and if all shards are alike, the update itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from quorate.commands.verify.records import Recording, ShardRecord, UpdateRecord
from quorate.replica.witness.module_trace import Event

# Causes.
WEIGHTS = "weights"  # the model is made with other weights
RESTORED = "restored"  # what a run that was resumed begins with is not what was there before
ROWS = "rows"  # a shard consists of other rows
ROW = "row"  # a row of the dataset has other content
BATCH = "batch"  # the batch made of the same rows is another
MODULE = "module"  # a module returned something else, given the same
BETWEEN = "between"  # a module was given something else, though all before it was the same
CALLS = "calls"  # other modules were called
LOSS = "loss"  # the loss or a metric, though all modules returned the same
BACKWARD = "backward"  # the gradient on its way back
GRADIENT = "gradient"  # the gradient of a parameter, though it was the same up to there
BUFFERS = "buffers"  # what a module keeps
STAGES = "stages"  # what stages made of shards, though all are the same in one piece
UPDATE = "update"  # the update, though all gradients are the same
RATE = "rate"  # the learning rate of the next update, though all before it is the same
LENGTH = "length"  # one run made fewer updates


@dataclass(frozen=True)
class Sighting:
    """A row, and where it was computed."""

    row: int
    worker: int
    step: int
    shard: int


@dataclass(frozen=True)
class Difference:
    """The first thing in which two runs differ."""

    cause: str
    update: int  # from 1; 0: before the first
    shard: int | None = None
    workers: tuple[int, int] | None = None  # that computed the shard in each run
    row: int | None = None
    seen: tuple[Sighting, ...] = ()  # other rows of the same run that hold what the row holds
    module: str | None = None  # "" is the model itself
    kind: str = ""  # the module's class
    after: str | None = None  # the module that returned last, the same in both
    metric: str | None = None
    parameter: str | None = None  # the first whose gradient differs, or else that differs itself
    parameters: int = 0  # how many do
    shards: int = 0  # how many of the update's differ
    rates: tuple[float, float] | None = None  # the learning rate, where it is what differs


def first_difference(first: Recording, second: Recording) -> Difference | None:
    """Return where two runs part; None if their bits are the same after each update of both."""
    for place, (a, b) in enumerate(zip(first.updates, second.updates, strict=False)):
        names = list(_differing(a.tensors, b.tensors))
        rates = (a.lr, b.lr)
        if not names and repr(a.lr) == repr(b.lr) and not _loss_differs(first, second, a.step):
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
    """Return the rows of the dataset whose content is not the same in both runs."""
    rows: set[int] = set()
    for ticket in first.shards.keys() & second.shards.keys():
        a, b = first.shards[ticket][0], second.shards[ticket][0]
        pairs = zip(a.rows, a.samples, b.rows, b.samples, strict=False)
        rows |= {row for row, text, again, changed in pairs if row == again and text != changed}
    return sorted(rows)


def alike(run: Recording) -> list[tuple[Sighting, Sighting]]:
    """Return rows of one epoch of a run that hold what an earlier row holds, after that row."""
    steps = max(1, int(run.facts.get("steps_per_epoch", 1)))
    first: dict[tuple[int, str], Sighting] = {}
    pairs = []
    for step, shard in sorted(run.shards):
        record = run.shards[step, shard][0]
        for row, text in zip(record.rows, record.samples, strict=True):
            here = Sighting(row, record.worker, step, shard)
            before = first.setdefault((step // steps, text), here)
            if before.row != row:
                pairs.append((before, here))
    return pairs


def _is_of_stages(first: Recording, second: Recording, step: int) -> bool:
    """Return whether stages computed a shard of a step otherwise than one piece, in either run."""
    return any(t.in_stages and t.step == step for run in (first, second) for t in run.twice)


def _loss_differs(first: Recording, second: Recording, step: int) -> bool:
    # Further metrics need not be functions of the data: seconds, say.
    for ticket in first.shards.keys() & second.shards.keys():
        if ticket[0] == step:
            mine, theirs = ({_loss(s) for s in run.shards[ticket]} for run in (first, second))
            if not mine & theirs:
                return True
    return False


def _loss(record: ShardRecord) -> tuple[str, ...]:
    return tuple(repr(record.metrics.get(name)) for name in ("loss", "weight"))


def _in_shards(
    first: tuple[Recording, UpdateRecord], second: tuple[Recording, UpdateRecord]
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
    seen: tuple[Sighting, ...] = ()
    if difference.row is not None:
        at = b.rows.index(difference.row)
        seen = tuple(_sightings(second[0], b.samples[at], difference.row))
        seen = seen or tuple(_sightings(first[0], a.samples[at], difference.row))
    names = list(_differing(a.gradient, b.gradient))
    return _with(difference, a, b, names, seen, len(parted))


def _counted(run: Recording, update: UpdateRecord, ticket: tuple[int, int]) -> list[ShardRecord]:
    """Return what was computed of a shard and went into the update: all, where that is not known.

    The last of its worker, as one that was killed may have noted what it never answered: the one
    in its place has its number.
    """
    copies = run.shards.get(ticket, [])
    mine = [record for record in copies if record.worker == update.computed_by.get(ticket[1])]
    return mine[-1:] or copies


def _with(
    difference: Difference,
    a: ShardRecord,
    b: ShardRecord,
    names: Sequence[str],
    seen: tuple[Sighting, ...],
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


def _sightings(run: Recording, text: str, but: int) -> Iterator[Sighting]:
    for (step, shard), records in sorted(run.shards.items()):
        for record in records:
            for row, held in zip(record.rows, record.samples, strict=True):
                if held == text and row != but:
                    yield Sighting(row, record.worker, step, shard)


def _parting(a: ShardRecord, b: ShardRecord, update: int) -> Difference | None:
    """Return where two computations of one shard part, in the order of causes."""
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
    """Names whose value is not the same in both, in the order of the first."""
    yield from (name for name, value in a.items() if repr(b.get(name)) != repr(value))
    yield from (name for name in b if name not in a)
