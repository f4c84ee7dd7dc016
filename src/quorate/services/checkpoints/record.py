"""The record of a checkpoint: the schema of state.json, and the consistency of the entries.

A matching checksum proves that a record is unchanged since the save, not that quorate wrote the
record. Before any use, the record is therefore compared with a schema, at every key and level, and
its entries are compared with each other. An unknown entry is an error, because quorate would
otherwise ignore a part of the state.

**To save more**, declare the entry in this module and nowhere else: a field of ``Record`` or
``AccountRecord``, optional if older checkpoints have to stay readable::

    same_bits: SameBits | None = None  # SameBits: a Struct of its own, forbid_unknown_fields=True

and, if the entry has to agree with other entries, a line in ``_contradictions``. A record is also
checked on writing, so a missing declaration makes the first save fail. A further file of tensors is
a name in ``File``, and a comparison in ``files.py``.
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
MOST_DEPTH = 32  # nesting of brackets
# Upper bounds for 64 MB of JSON written by quorate: an object has at least 20 bytes.
MOST_OBJECTS, MOST_VALUES = 3 << 20, 8 << 20
_SAVED_BY = 253_402_300_799.0  # latest time, seconds since the epoch: end of the year 9999

MOST_COUNT = 1 << 53  # of steps, rows or bytes
Count = Annotated[int, Meta(ge=0, le=MOST_COUNT)]
# Seconds since the epoch, as a time of day can be shown.
Moment = Annotated[float, Meta(ge=0, le=_SAVED_BY)]
Positive = Annotated[int, Meta(ge=1, le=MOST_COUNT)]
Pid = Annotated[int, Meta(ge=1, lt=1 << 31)]
# A setting's value, or a text produced by quorate: never with control characters.
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
Number = bool | int | float | str | None  # optimizer state that is not a tensor


class TallyRecord(Struct, forbid_unknown_fields=True):
    """The shards of each worker, by outcome; see ``quorate.coordination.tally``."""

    fresh: list[Count]
    stale: list[Count]
    dropped: list[Count]
    copies: list[Count]
    staleness: tuple[Count, Count]  # sum, max


class BestRecord(Struct, forbid_unknown_fields=True):
    """The best evaluation of the run."""

    metric: str
    value: float
    global_step: Count


class AccountRecord(Struct, forbid_unknown_fields=True):
    """The outcome of all shards of the run, and the steps still open; see ``State.account``."""

    left_open: list[Count]
    tally: TallyRecord
    dropped_rows: Count
    not_finite: Count
    evaluated_at: Count
    best: BestRecord | None


class GroupRecord(Struct, forbid_unknown_fields=True):
    """A parameter group of the optimizer; see ``OptimizerState``."""

    names: list[str]
    values: dict[str, Any]  # trees, see ``trees.py``


class RoundRecord(Struct, forbid_unknown_fields=True):
    """The updates of a round; see ``quorate.coordination.epochs``."""

    phases: list[Word]  # the phase of each update, in order
    takes: list[Count]  # the batch of each update, as a position in the round


class SavedOptimizer(Struct, forbid_unknown_fields=True, kw_only=True):
    """The state of an optimizer and its schedule."""

    optimizer: Word
    optimizer_numbers: dict[str, dict[str, Number]]  # by parameter and entry
    optimizer_state: Any = None  # a tree: the state_dict of an optimizer without vectors
    optimizer_attributes: dict[str, Any] = {}  # trees: state that the optimizer keeps in attributes
    optimizer_groups: list[GroupRecord] = []
    schedule_state: Any = None  # a tree; None: the schedule is replayed from its start
    schedule: Word | None = None
    clip_norm: Annotated[float, Meta(gt=0, le=sys.float_info.max)] | None = None
    hyperparameters: list[dict[str, Any]] = []  # of the schedule, then of each parameter group


class SavedUpdate(SavedOptimizer, kw_only=True):
    """The state of the updates of a phase, or of a run without phases."""

    ema_decay: Annotated[float, Meta(gt=0, lt=1)] | None = None
    optimizers: list[SavedOptimizer] | None = None  # if an update has a list of optimizers


class PhaseState(SavedUpdate, kw_only=True):
    """The state of a phase; see ``phases.py``."""

    name: Word
    updates: Count  # number of updates of this phase


class ModelEditsRecord(Struct, forbid_unknown_fields=True):
    """The changes that user code made to the model; see ``quorate.engines.model_changes``."""

    number: Count
    switched_off: list[str]
    attributes: dict[str, dict[str, Number]]  # by module and attribute
    frozen: Count


class Record(SavedUpdate, kw_only=True):
    """The schema of state.json. A field with a default may be missing in older records."""

    format: Literal[2]
    global_step: Count
    epoch: Count
    seed: Annotated[int, Meta(ge=0)]
    shards: Positive
    batch_size: Positive
    rows: Positive
    shuffle: bool
    update: Word
    account: AccountRecord
    order: list[str]  # names in model.safetensors, in the order of the model
    saved_at: Moment
    files: dict[File, Sha256]
    callbacks: dict[str, Any] = {}  # trees: the state of callbacks, by name
    amendments: ModelEditsRecord | None = None
    shared: dict[Key, dict[Key, Number]] = {}  # values of each ``Shared`` other than tensors
    is_ordered: bool = False
    order_sha256: Sha256 | None = None  # of an order with declared dependencies
    is_augmented: bool = False
    last: Literal["short", "drop", "join"] = "short"
    sampling: Sha256 | None = None  # of the weights for drawing rows
    sampled_rows: Positive | None = None  # rows per epoch, if rows are drawn
    last_step: Count = 0  # total number of updates requested; 0: not saved
    progress: bool = False  # whether user code asked for the progress of the run
    slow: list[Word] = []  # descriptions of slow workers, newest last
    engine: Word = ""
    devices: list[Word] = []
    device_types: list[Word] = []
    workers: Positive | None = None
    threads: Positive | None = None
    precision: Word = ""
    compile: bool = False
    deterministic: bool | None = None
    kernels: Literal["torch", "onednn"] = "torch"  # for float32 products on a CPU
    random: Literal["device", "host"] = "device"  # where random numbers of accelerators are drawn
    torch: Word = ""
    python: Word = ""
    processors: list[Word] = []
    row_sample: dict[RowNumber, str | None] | None = None  # hashes; see data.row_sample
    round: RoundRecord | None = None  # the round, if the run has phases
    phases: list[PhaseState] | None = None  # in the order of their first update
    doubts: list[str] = []  # reasons why the bits may depend on the number of workers


def parsed(text: bytes) -> dict[str, Any]:
    """Return the record in a state.json.

    Raises:
        ValueError: the text is not JSON, has a key twice, or is not a record that quorate could
            have saved; the message is one line.
    """
    record = parsed_json(text)
    if isinstance(record, dict) and (found := record.get("format")) != FORMAT:
        raise ValueError(f"got format {abridged(found)}, expected {FORMAT}")
    require_valid(record)
    valid: dict[str, Any] = record
    return valid


def parsed_json(text: bytes) -> Any:
    """Parse JSON from an untrusted source.

    Raises:
        ValueError: the text is not JSON, is nested too deeply, has too many values, a key twice, or
            a number with too many digits.
    """
    _require_bounded(text)
    try:
        # Decode before parsing: json.loads would also accept UTF-16, whose brackets were not
        # counted.
        return json.loads(text.decode(), object_pairs_hook=_without_duplicates)
    except UnicodeDecodeError as error:
        raise ValueError(f"got bytes that are no UTF-8 at byte {error.start:,}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"got no JSON: {error}") from error


def require_valid(record: Any) -> None:
    """Check a record, both before writing and after reading.

    Raises:
        ValueError: the record violates the schema, or contradicts itself.
    """
    try:
        valid = convert(record, Record, strict=True)
    except ValidationError as error:
        raise ValueError(f"got a record that is none: {printable(error)}") from error
    for contradiction in _contradictions(valid):
        raise ValueError(contradiction)


def body_sha256(record: dict[str, Any]) -> str:
    """Return the SHA-256 of a record without "files", as stored in each tensor file's header."""
    body = {name: value for name, value in record.items() if name != "files"}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def contradicts(record: dict[str, Any], file: str, names: Collection[str]) -> str:
    """Return the fault in the names of a file's tensors, or an empty text.

    Args:
        record: a valid record.
    """
    if file == "optimizer.safetensors":  # "exp_avg.conv1.weight"
        odd = [name for name in names if not all(name.partition("."))]
        return f"got {abridged(odd[0])}, expected entry.parameter" if odd else ""
    if file == "shared.safetensors":  # "mean.teacher.0.weight": name of the Shared, key
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


def abridged(value: object) -> str:
    """Return a value of a record for a message: on one line, printable, not too long."""
    return printable(repr(value), 60)


def _contradictions(record: Record) -> Iterator[str]:
    """Yield the contradictions between the entries of a record whose types are valid."""
    step, account = record.global_step, record.account
    # 1. The settings, and the position implied by the settings.
    try:
        rule = rules.parse(record.update)
    except SettingError as error:
        yield printable(error)
        return
    if (record.sampling is None) != (record.sampled_rows is None):
        yield f"got sampling={record.sampling} and sampled_rows={record.sampled_rows}"
    dealt = record.sampled_rows or record.rows  # rows per epoch
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
    # 2. The open steps: only rules that apply steps out of order have any, and the last step begun
    # is never open.
    left, end = account.left_open, step + len(account.left_open)
    if left and not rule.staleness:
        yield f"got left_open={abridged(left)}, expected none under {rule.name}"
    if left != sorted(set(left)) or (left and left[-1] >= end - 1):
        yield f"got left_open={abridged(left)}, expected steps before {end - 1:,} in order"
    # 3. The outcomes of shards and evaluations.
    tally = account.tally
    if len({len(tally.fresh), len(tally.stale), len(tally.dropped), len(tally.copies)}) != 1:
        yield "got a tally of other workers in each column"
    if tally.staleness[1] > tally.staleness[0]:
        yield f"got a greatest staleness above their sum: {abridged(tally.staleness)}"
    if account.not_finite > step + 1:  # a skipped update may be counted before its step
        yield f"got not_finite={account.not_finite:,}, expected at most {step:,}"
    if account.evaluated_at > step:
        yield f"got evaluated_at={account.evaluated_at:,}, expected at most {step:,}"
    if (best := account.best) is not None:
        if best.global_step > step:
            yield f"got the best at step {best.global_step:,}, expected at most {step:,}"
        if math.isnan(best.value):
            yield "got NaN as the best value"
    # 4. The optimizers and their schedules.
    decay = record.ema_decay
    for each in (record, *(record.phases or ())):
        of = f" of phase {abridged(each.name)}" if isinstance(each, PhaseState) else ""
        decay = each.ema_decay if decay is None else decay
        for saved in (each, *(each.optimizers or ())):
            if saved.schedule_state is not None and saved.schedule is None:
                yield f"got schedule_state={abridged(saved.schedule_state)}{of}, and no schedule"
        if each.optimizers is not None:
            named = " + ".join(saved.optimizer for saved in each.optimizers)
            if named != each.optimizer:
                yield f"got optimizer={abridged(each.optimizer)}, expected {abridged(named)}"
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


def _round(found: RoundRecord) -> epochs.Round:
    return epochs.Round(tuple(found.phases), tuple(found.takes))


def _wrong_round(found: RoundRecord, phases: list[PhaseState]) -> str:
    """Return the fault of a round, or an empty text."""
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
_STEPS = [1 if mark in b"[{" else -1 for mark in range(256)]  # change of depth per bracket


def _require_bounded(text: bytes) -> None:
    """Refuse JSON whose parsing would take too much time, memory or stack. Stops reading early.

    Raises:
        ValueError: the text is nested too deeply, or has more values than any text written by
            quorate.
    """
    if (quotes := text.count(b'"')) > 2 * MOST_VALUES:
        raise ValueError(f"got {quotes:,} quotes, expected at most {2 * MOST_VALUES:,}")
    depth = opened = commas = 0
    # Scan stretch by stretch, to stop early at a text beyond the bounds. No stretch ends inside a
    # string, except in an unterminated string.
    for stretch in _STRETCH.finditer(text):
        bare = _STRINGS.sub(b"", stretch[0])  # brackets and commas inside strings do not count
        brackets = bare.translate(None, _OTHERS)
        opened += brackets.count(b"[") + brackets.count(b"{")
        commas += bare.count(b",")
        if opened > MOST_OBJECTS or commas > MOST_VALUES:
            raise ValueError(
                f"got over {opened:,} lists and objects and {commas:,} commas, expected at most "
                f"{MOST_OBJECTS:,} and {MOST_VALUES:,}"
            )
        depths = [*itertools.accumulate(map(_STEPS.__getitem__, brackets), initial=depth)]
        if (deepest := max(depths)) > MOST_DEPTH:  # the parser recurses: the process would crash
            raise ValueError(
                f"got {deepest:,} or more brackets in each other, expected at most {MOST_DEPTH}"
            )
        depth = depths[-1]
