"""A shard computed again, to compare the results and the state kept by the model.

State with a single change is a filled cache, as long as the result is the same before and after.
State with a change each time is not shared by workers.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from quorate.replica.fingerprint import fingerprint
from quorate.replica.replica import Replica
from quorate.replica.shard_sum import ShardSum
from quorate.replica.sparse.found import GradKinds, dense_text, found_in
from quorate.replica.streams import Stream
from quorate.replica.witness import words
from quorate.replica.witness.calls import OPERATOR, culprit, paired
from quorate.replica.witness.kept import GENERATOR, ITERATOR, Kept, changed
from quorate.replica.witness.operator_trace import traced

MOST_NAMED = 3  # attributes named by one check
CURE = "each worker has its own value, and no checkpoint saves it"


NONE_FOUND = GradKinds()
_ATTRIBUTE = re.compile(r"(?:(.*)\.)?(\w+) \((\w+)\)")  # a name of ``kept``, of a module


class Computed(NamedTuple):
    """The result of a shard, with the model's kept state before and after."""

    result: str  # fingerprint
    before: Kept
    after: Kept
    gradients: GradKinds = NONE_FOUND  # kinds of gradients


class ShardArgs(NamedTuple):
    """The arguments for computing a shard again."""

    data: Any
    rows: int
    stream: Stream
    seed: int


def result_of(shard_sum: ShardSum, *, with_buffers: bool = True) -> str:
    """Return a hash over a shard's results; of metrics only the loss, others may be durations.

    Args:
        with_buffers: whether to include buffers and written parameters.
    """
    total = shard_sum
    values: list[object] = [total.weight, total.metrics["loss"]]
    if total.gradient is not None:
        gradient = total.gradient
        named = {n: v for n, v in gradient.named.items() if n not in (total.missing or ())}
        has_rows = gradient.rows or gradient.made_dense
        # By rows even where made dense, as in the first trial, to which later trials are compared.
        values.append(sorted(named.items()) if has_rows else gradient.vectors)
    if with_buffers:
        values += [total.buffers, total.integer_buffers]
        values.append(None if total.written is None else total.written.vectors)
    return fingerprint(values)


def gradients_of(replica: Replica, shard_sum: ShardSum) -> GradKinds:
    """Return the kinds of a shard's gradients: by rows, or dense."""
    return found_in(replica.model, shard_sum.gradient, shard_sum.missing or ())


def texts_of(found: GradKinds) -> list[str]:
    """Return messages about gradients by rows in the last trial, which are made dense."""
    return [dense_text(found.by_rows)] if found.by_rows else []


def doubts(replica: Replica, first: Computed, last: Computed, shard: ShardArgs | None) -> list[str]:
    """Return reasons why two computations of a shard differ, or a third may differ.

    Args:
        replica: the computing replica.
        first: the first computation.
        last: the computation with filled caches.
        shard: the shard, computed again to find the operator to blame; None: name no operator.
    """
    model = replica.model
    if names := changed(last.before, last.after):
        return [
            f"{place(model, name)} changes in each forward pass: {CURE}; "
            f"{advice(name, last.after)}, or remove it"
            for name in names[:MOST_NAMED]
        ]
    if first.result == last.result:
        return []
    if names := changed(first.before, first.after):
        return [
            f"{place(model, name)} is set in the first forward pass and changes later results: "
            f"{CURE}; {advice(name, first.after)}"
            for name in names[:MOST_NAMED]
        ]
    found = None if shard is None else _blamed(replica, shard)
    return [
        found
        or "the same shard gave different results when computed twice: the code reads the clock, "
        "draws from its own generator, or keeps state between shards"
    ]


def _blamed(replica: Replica, shard: ShardArgs) -> str | None:
    """Return the operator at which two more computations diverge, in words."""
    try:
        (calls, once), (calls_again, again) = (
            traced(replica, shard.data, shard.stream, shard.seed, fill) for fill in range(2)
        )
        blamed = culprit(calls, calls_again, paired(once, again))
    except Exception:  # user code that cannot be watched
        return None
    if blamed is None:
        return None
    # Without values, which differ each time: notes are known by their text.
    both = "{}, then {}" if blamed.why == OPERATOR else "a different value each time"
    reason, *where = words.call(blamed, both)
    return f"the same shard gives different results each time: {reason}, {', '.join(where)}"


def advice(name: str, kept: Kept) -> str:
    """Return the cure for state that changes with the computation of shards, by kind of state.

    Args:
        name: name of the state in ``kept``.
        kept: the state after the change.
    """
    kind = kept.get(name, "")
    if kind.startswith(GENERATOR):
        return (
            "draw from the default generators, seeded by quorate for each shard (torch.rand, "
            "random.random, np.random.rand)"
        )
    if _ATTRIBUTE.fullmatch(name) and not kind.startswith(ITERATOR):
        return "make it a buffer (register_buffer)"
    return (
        "compute it from at.step (add an argument `at` to the loss or to forward), or keep it in a "
        "buffer of the model"
    )


def place(model: torch.nn.Module, name: str) -> str:
    """Return a name of ``kept`` with the line that sets the attribute, if found."""
    match = _ATTRIBUTE.fullmatch(name)
    if match is None:
        return name
    path, attribute, _ = match.groups()
    try:
        kind = type(model.get_submodule(path or ""))
        lines, start = inspect.getsourcelines(kind)
        file = inspect.getfile(kind).rpartition("/")[2]
    except (AttributeError, OSError, TypeError):
        return name
    if (number := _line(lines, attribute)) is None:
        return name
    return f"{name[:-1]}, {file}:{start + number})"


def _line(lines: Sequence[str], attribute: str) -> int | None:
    """Return the number of the last line that sets an attribute or calls a method of it."""
    sets = re.compile(rf"\.{attribute}\b\s*([-+*/|&^%@]|//|\*\*)?=[^=]|\.{attribute}\b[.\[]")
    found = [number for number, line in enumerate(lines) if sets.search(line)]
    return found[-1] if found else None
