"""The record of a checkpoint: what state.json may say, and what in it has to agree.

A checksum says that a record is the one that was written, and not that this program wrote it. So
it is compared with a schema, at every key and level, before anything in it is used, and with what
follows from its other entries. What was not understood is not used: an unknown entry is an error.

**To save more**, declare it here and nowhere else: a field of ``Record`` or ``Account``, optional
if checkpoints of before it have to stay readable::

    same_bits: SameBits | None = None  # SameBits: a Struct of its own, forbid_unknown_fields=True

and if it has to agree with other entries, a line in ``_contradictions``. A record is checked when
it is written too, so that an entry that was forgotten here fails the first save. A further file of
tensors is a name in ``File``, and a comparison in ``files.py``.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
import sys
from collections.abc import Collection, Iterator
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, ValidationError, convert

from quorate.coordination import epochs, rules
from quorate.errors import SettingError
from quorate.machine.text import printable

FORMAT = 2
MOST_BYTES = 64 << 20  # of a record: 200,000 parameters with 100 bytes each are 20 MB
MOST_DEPTH = 32  # of brackets in brackets
# What 64 MB of JSON that quorate writes stay below: an object has at least 20 bytes.
MOST_OBJECTS, MOST_VALUES = 3 << 20, 8 << 20
_SAVED_BY = 253_402_300_799.0  # seconds since the epoch: the end of the year 9999

MOST_COUNT = 1 << 53  # of steps, rows, bytes
Count = Annotated[int, Meta(ge=0, le=MOST_COUNT)]
Positive = Annotated[int, Meta(ge=1, le=MOST_COUNT)]
# Of a setting, or found out by us: never with control characters.
Word = Annotated[str, Meta(max_length=4096, pattern=r"\A[^\x00-\x1f\x7f-\x9f]*\Z")]
RowNumber = Annotated[str, Meta(pattern=r"\A[0-9]{1,19}\Z")]
Key = Annotated[str, Meta(max_length=4096, pattern=r"\A[A-Za-z][A-Za-z0-9_]*\Z")]  # of a ``Shared``
Sha256 = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
File = Literal[
    "model.safetensors",
    "averaged.safetensors",
    "rest.safetensors",
    "optimizer.safetensors",
    "shared.safetensors",
    "callbacks.safetensors",
]
Number = bool | int | float | str | None  # what an optimizer keeps beside tensors


class Tally(Struct, forbid_unknown_fields=True):
    """What became of the shards of each worker; see ``quorate.coordination.tally``."""

    fresh: list[Count]
    stale: list[Count]
    dropped: list[Count]
    copies: list[Count]
    staleness: tuple[Count, Count]  # sum, max


class Best(Struct, forbid_unknown_fields=True):
    """The best evaluation so far."""

    metric: str
    value: float
    global_step: Count


class Account(Struct, forbid_unknown_fields=True):
    """What became of the shards so far, and which are left; see ``State.account``."""

    left_open: list[Count]
    tally: Tally
    dropped_rows: Count
    not_finite: Count
    evaluated_at: Count
    best: Best | None


class Group(Struct, forbid_unknown_fields=True):
    """A group of parameters of the optimizer; see ``OptimizerState``."""

    names: list[str]
    values: dict[str, Any]  # trees, see ``trees.py``


class Round(Struct, forbid_unknown_fields=True):
    """The updates of a round; see ``quorate.coordination.epochs``."""

    phases: list[Word]  # of each, in order
    takes: list[Count]  # which of the round's batches


class PhaseState(Struct, forbid_unknown_fields=True):
    """What a phase has of its own; see ``by_phase.py``, and ``Record`` for entries of the name."""

    name: Word
    updates: Count  # of this phase
    optimizer: Word
    optimizer_numbers: dict[str, dict[str, Number]]
    optimizer_state: Any = None
    optimizer_attributes: dict[str, Any] = {}
    optimizer_groups: list[Group] = []
    schedule_state: Any = None
    schedule: Word | None = None
    clip_norm: Annotated[float, Meta(gt=0, le=sys.float_info.max)] | None = None
    ema_decay: Annotated[float, Meta(gt=0, lt=1)] | None = None
    hyperparameters: list[dict[str, Any]] = []


class Amended(Struct, forbid_unknown_fields=True):
    """What user code changed in the model; see ``quorate.engines.model_changes``."""

    number: Count
    switched_off: list[str]
    attributes: dict[str, dict[str, Number]]  # by module and attribute
    frozen: Count


class Record(Struct, forbid_unknown_fields=True):
    """state.json. What has a default may be missing: in records of before it was saved."""

    format: Literal[2]
    global_step: Count
    epoch: Count
    seed: Annotated[int, Meta(ge=0)]
    shards: Positive
    batch_size: Positive
    rows: Positive
    shuffle: bool
    update: Word
    account: Account
    order: list[str]  # names in model.safetensors, in the order of the model
    optimizer: Word
    optimizer_numbers: dict[str, dict[str, Number]]  # by parameter and entry
    saved_at: Annotated[float, Meta(ge=0, le=_SAVED_BY)]  # seconds since the epoch
    files: dict[File, Sha256]
    optimizer_state: Any = None  # a tree: what its own state_dict gave, if it works on no vector
    optimizer_attributes: dict[str, Any] = {}  # trees, of what it keeps elsewhere
    optimizer_groups: list[Group] = []
    schedule_state: Any = None  # a tree; None: it is stepped through from its beginning
    callbacks: dict[str, Any] = {}  # trees, of what callbacks keep, by their names
    amendments: Amended | None = None
    shared: dict[Key, dict[Key, Number]] = {}  # what is no tensor of each ``Shared``
    is_ordered: bool = False
    order_sha256: Sha256 | None = None  # of an order that says what it depends on
    is_augmented: bool = False
    last: Literal["short", "drop", "join"] = "short"
    sampling: Sha256 | None = None  # of the weights by which rows are drawn
    sampled_rows: Positive | None = None  # that an epoch has, if they are drawn
    last_step: Count = 0  # updates that were asked for in all; 0: it was not saved
    progress: bool = False  # whether code asked how much of them is done
    slow: list[Word] = []  # workers, as they were named: the newest last
    engine: Word = ""
    devices: list[Word] = []
    device_types: list[Word] = []
    workers: Positive | None = None
    threads: Positive | None = None
    precision: Word = ""
    compile: bool = False
    deterministic: bool | None = None
    kernels: Literal["torch", "onednn"] = "torch"  # of products of float32 on a CPU
    random: Literal["device", "host"] = "device"  # where accelerators' numbers are drawn
    schedule: Word | None = None
    clip_norm: Annotated[float, Meta(gt=0, le=sys.float_info.max)] | None = None
    ema_decay: Annotated[float, Meta(gt=0, lt=1)] | None = None
    torch: Word = ""
    python: Word = ""
    processors: list[Word] = []
    row_sample: dict[RowNumber, str | None] | None = None  # hashes; see data.row_sample
    hyperparameters: list[dict[str, Any]] = []  # of the schedule, then of each parameter group
    round: Round | None = None  # of phases, if there are some
    phases: list[PhaseState] | None = None  # in the order in which each comes first
    doubts: list[str] = []  # why the bits may not be those of another number of workers


def parsed(text: bytes) -> dict[str, Any]:
    """Return the record in a state.json.

    Raises:
        ValueError: it is no JSON, has a key twice, or is not a record that could have been saved;
            the message is one line.
    """
    record = parsed_json(text)
    if isinstance(record, dict) and (found := record.get("format")) != FORMAT:
        raise ValueError(f"got format {abridged(found)}, expected {FORMAT}")
    require_valid(record)
    valid: dict[str, Any] = record
    return valid


def parsed_json(text: bytes) -> Any:
    """Parse JSON that anybody may have written.

    Raises:
        ValueError: it is no JSON, is too deep or has too many values, has a key twice, or a number
            of too many digits.
    """
    _require_bounded(text)
    try:
        # Decoded here: the parser would take UTF-16 too, in which brackets were not counted.
        return json.loads(text.decode(), object_pairs_hook=_without_duplicates)
    except UnicodeDecodeError as error:
        raise ValueError(f"got bytes that are no UTF-8 at byte {error.start:,}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"got no JSON: {error}") from error


def require_valid(record: Any) -> None:
    """Check a record, as it is written and as it is read.

    Raises:
        ValueError: it does not fit the schema, or contradicts itself.
    """
    try:
        valid = convert(record, Record, strict=True)
    except ValidationError as error:
        raise ValueError(f"got a record that is none: {printable(error)}") from error
    for contradiction in _contradictions(valid):
        raise ValueError(contradiction)


def body_sha256(record: dict[str, Any]) -> str:
    """Return the SHA-256 of a record but for its "files": each tensor file has it in its header."""
    body = {name: value for name, value in record.items() if name != "files"}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def contradicts(record: dict[str, Any], file: str, names: Collection[str]) -> str:
    """Return what is wrong with the names of a file's tensors, or an empty text.

    Args:
        record: a valid one.
    """
    if file == "optimizer.safetensors":  # "exp_avg.conv1.weight"
        odd = [name for name in names if not all(name.partition("."))]
        return f"got {abridged(odd[0])}, expected entry.parameter" if odd else ""
    if file == "shared.safetensors":  # "mean.teacher.0.weight": of which Shared, under which key
        odd = [name for name in names if name.partition(".")[0] not in record.get("shared", {})]
        odd += [name for name in names if not all(name.split(".")[:2]) or "." not in name]
        return f"got {abridged(odd[0])}, expected the name of a Shared and a key" if odd else ""
    if file == "rest.safetensors":  # "model.table"
        odd = [n for n in names if n.partition(".")[0] not in ("model", "averaged")]
        return f"got {abridged(odd[0])}, expected model.name or averaged.name" if odd else ""
    if file == "callbacks.safetensors":  # "EarlyStopping.best.conv1.weight"
        odd = [n for n in names if not any(n.startswith(f"{c}.") for c in record["callbacks"])]
        return f"got {abridged(odd[0])}, expected callback.entry" if odd else ""
    if differing := set(record["order"]) ^ set(names):
        name = min(differing)
        where = "the file" if name in names else "the record"
        return f"{abridged(name)} is in {where} alone"
    return ""


def abridged(value: object, most: int = 60) -> str:
    """Return a value of a record for a message: on one line, printable, not too long."""
    return printable(repr(value), most)


def _contradictions(record: Record) -> Iterator[str]:
    """Yield what in a record cannot be, as it has the right types."""
    step, account = record.global_step, record.account
    # 1. The settings, and the position that follows from them.
    try:
        rule = rules.parse(record.update)
    except SettingError as error:
        yield printable(error)
        return
    if (record.sampling is None) != (record.sampled_rows is None):
        yield f"got sampling={record.sampling} and sampled_rows={record.sampled_rows}"
    dealt = record.sampled_rows or record.rows  # in an epoch
    batch_size = min(record.batch_size, dealt)
    if not rule.least_shards <= record.shards <= batch_size:
        yield (
            f"got shards={record.shards:,}, expected {rule.least_shards:,} to {batch_size:,} under "
            f"{rule.name} with batches of {batch_size:,} rows"
        )
    per_epoch = epochs.steps_per_epoch(
        dealt, batch_size, record.shards, by_shard=rule.by_shard, last=record.last
    )
    if record.round is not None:
        if wrong := _wrong_round(record.round, record.phases or []):
            yield wrong
            return
        per_epoch = max(1, _round(record.round).updates(per_epoch))
    if record.epoch != step // per_epoch:
        yield (
            f"got epoch {record.epoch:,} at step {step:,}, expected {step // per_epoch:,}: "
            f"an epoch has {per_epoch:,} steps"
        )
    # 2. The steps left open: none but under rules that apply steps out of their order, and never
    # the last one that was begun.
    left, end = account.left_open, step + len(account.left_open)
    if left and not rule.staleness:
        yield f"got left_open={abridged(left)}, expected none under {rule.name}"
    if left != sorted(set(left)) or (left and left[-1] >= end - 1):
        yield f"got left_open={abridged(left)}, expected steps before {end - 1:,} in order"
    # 3. What became of shards and evaluations.
    tally = account.tally
    if len({len(tally.fresh), len(tally.stale), len(tally.dropped), len(tally.copies)}) != 1:
        yield "got a tally of other workers in each column"
    if tally.staleness[1] > tally.staleness[0]:
        yield f"got a greatest staleness above their sum: {abridged(tally.staleness)}"
    if account.not_finite > step + 1:  # one may be counted before its step is
        yield f"got not_finite={account.not_finite:,}, expected at most {step:,}"
    if account.evaluated_at > step:
        yield f"got evaluated_at={account.evaluated_at:,}, expected at most {step:,}"
    if (best := account.best) is not None:
        if best.global_step > step:
            yield f"got the best at step {best.global_step:,}, expected at most {step:,}"
        if math.isnan(best.value):
            yield "got NaN as the best value"
    # 4. The schedule.
    if record.schedule_state is not None and record.schedule is None:
        yield f"got schedule_state={abridged(record.schedule_state)}, and no schedule"
    decay = record.ema_decay
    for phase in record.phases or ():
        decay = phase.ema_decay if decay is None else decay
        if phase.schedule_state is not None and phase.schedule is None:
            yield f"got a schedule_state of phase {abridged(phase.name)}, and no schedule"
    if record.phases is not None:
        if record.round is None:
            yield "got phases, and no round of them"
        named = ", ".join(f"{phase.name}: {phase.optimizer}" for phase in record.phases)
        if named != record.optimizer:
            yield f"got optimizer={abridged(record.optimizer)}, expected {abridged(named)}"
        if (made := sum(phase.updates for phase in record.phases)) != step:
            yield f"got {made:,} updates of all phases, expected {step:,}"
    # 5. The files.
    if len(set(record.order)) != len(record.order):
        yield "got a name twice in order"
    for name in ("model.safetensors", "optimizer.safetensors"):
        if name not in record.files:
            yield f"got no checksum of {name}"
    if (decay is not None) != ("averaged.safetensors" in record.files):
        yield (
            f"got ema_decay={decay} and files {', '.join(sorted(record.files))}: "
            "averaged.safetensors is there if weights are averaged"
        )


def _round(found: Round) -> epochs.Round:
    return epochs.Round(tuple(found.phases), tuple(found.takes))


def _wrong_round(found: Round, phases: list[PhaseState]) -> str:
    """Return what is wrong with a round, or an empty text."""
    names, takes = list(dict.fromkeys(found.phases)), found.takes
    steps = [later - take for take, later in itertools.pairwise(takes)]
    if not takes or takes[0] or not set(steps) <= {0, 1} or len(takes) != len(found.phases):
        return f"got a round that is none: {abridged(found.phases)} with batches {abridged(takes)}"
    if names != [phase.name for phase in phases]:
        return f"got a round of {abridged(names)}, and other phases"
    return ""


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        name = next(n for n, _ in pairs if n in seen or seen.add(n))  # type: ignore[func-returns-value]
        raise ValueError(f"got {abridged(name)} twice")
    return found


_STRINGS = re.compile(rb'"[^"\\]*+(?:\\.?[^"\\]*+)*+(?:"|\Z)', re.DOTALL)
_STRETCH = re.compile(
    rb'(?:[^"]{0,1000000}+"[^"\\]*+(?:\\.?[^"\\]*+)*+"){1,20000}+|[^"]{1,1000000}+|".*+', re.DOTALL
)
_OTHERS = bytes(set(range(256)) - set(b"[]{}"))
_STEPS = [1 if mark in b"[{" else -1 for mark in range(256)]  # by bracket: deeper, or out again


def _require_bounded(text: bytes) -> None:
    """Refuse JSON whose parsing would take long, much memory, or the stack, however it goes on.

    Raises:
        ValueError: it is too deep, or has too many values for a text that quorate writes.
    """
    if (quotes := text.count(b'"')) > 2 * MOST_VALUES:
        raise ValueError(f"got {quotes:,} quotes, expected at most {2 * MOST_VALUES:,}")
    depth = opened = commas = 0
    # A stretch at a time: what is too much is not looked at to its end. None ends in a string, but
    # for one without an end.
    for stretch in _STRETCH.finditer(text):
        bare = _STRINGS.sub(b"", stretch[0])  # brackets and commas in strings are none
        brackets = bare.translate(None, _OTHERS)
        opened += brackets.count(b"[") + brackets.count(b"{")
        commas += bare.count(b",")
        if opened > MOST_OBJECTS or commas > MOST_VALUES:
            raise ValueError(
                f"got over {opened:,} lists and objects and {commas:,} commas, expected at most "
                f"{MOST_OBJECTS:,} and {MOST_VALUES:,}"
            )
        depths = [*itertools.accumulate(map(_STEPS.__getitem__, brackets), initial=depth)]
        if (deepest := max(depths)) > MOST_DEPTH:  # the parser is recursive: the process would end
            raise ValueError(
                f"got {deepest:,} or more brackets in each other, expected at most {MOST_DEPTH}"
            )
        depth = depths[-1]
