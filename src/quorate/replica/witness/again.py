"""A shard computed again: is the result the same, and is what a model keeps?

What changes the first time and never again is a cache that is filled; it is one as long as the
result is the same before and after. What changes each time is a state that workers do not share.
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
from quorate.replica.sparse.found import Found, dense_text, found_in
from quorate.replica.streams import Stream
from quorate.replica.witness import words
from quorate.replica.witness.calls import OPERATOR, culprit, paired
from quorate.replica.witness.kept import GENERATOR, ITERATOR, Kept, changed
from quorate.replica.witness.operator_trace import traced

MOST_NAMED = 3  # attributes that one look names
CURE = "each worker has its own value, and no checkpoint saves it"


NONE_FOUND = Found()
_ATTRIBUTE = re.compile(r"(?:(.*)\.)?(\w+) \((\w+)\)")  # a name of ``kept``: of a module's


class Computed(NamedTuple):
    """What a shard gave, and what the model kept before and after it."""

    result: str  # fingerprint
    before: Kept
    after: Kept
    gradients: Found = NONE_FOUND  # how they came


class Shard(NamedTuple):
    """What is needed to compute a shard once more."""

    data: Any
    rows: int
    stream: Stream
    seed: int


def result_of(shard_sum: ShardSum, *, with_buffers: bool = True) -> str:
    """Return a hash over what a shard gave. Metrics but the loss may be seconds, and do not count.

    Args:
        with_buffers: and over the buffers after it, and the parameters that it wrote.
    """
    total = shard_sum
    values: list[object] = [total.weight, total.metrics["loss"]]
    if total.gradient is not None:
        gradient = total.gradient
        named = {n: v for n, v in gradient.named.items() if n not in (total.missing or ())}
        has_rows = gradient.rows or gradient.made_dense
        # By rows also where they are made dense: in a first trial, which others are compared with.
        values.append(sorted(named.items()) if has_rows else gradient.vectors)
    if with_buffers:
        values += [total.buffers, total.integer_buffers]
        values.append(None if total.written is None else total.written.vectors)
    return fingerprint(values)


def gradients_of(replica: Replica, shard_sum: ShardSum) -> Found:
    """Return how the gradients of a shard came: by rows, or dense."""
    return found_in(replica.model, shard_sum.gradient, shard_sum.missing or ())


def texts_of(found: Found) -> list[str]:
    """Return what to say of gradients that came by rows in the last trial: they are made dense."""
    return [dense_text(found.by_rows)] if found.by_rows else []


def doubts(replica: Replica, first: Computed, last: Computed, shard: Shard | None) -> list[str]:
    """Return why two computations of one shard are not the same, or the next one may not be.

    Args:
        replica: that computed them.
        first: computation.
        last: the one that was made when caches were filled.
        shard: what to compute for the name of the operator that is to blame; None: to name none.
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


def _blamed(replica: Replica, shard: Shard) -> str | None:
    """Return the operator that two more computations part at, in words."""
    try:
        (calls, once), (calls_again, again) = (
            traced(replica, shard.data, shard.stream, shard.seed, fill) for fill in range(2)
        )
        blamed = culprit(calls, calls_again, paired(once, again))
    except Exception:  # user code that does not bear to be watched
        return None
    if blamed is None:
        return None
    # Without the values, which are others each time: what is said once is known by its text.
    both = "{}, then {}" if blamed.why == OPERATOR else "a different value each time"
    reason, *where = words.call(blamed, both)
    return f"the same shard gives different results each time: {reason}, {', '.join(where)}"


def advice(name: str, kept: Kept) -> str:
    """Return what to do about a state that changes while shards are computed, by what holds it.

    Args:
        name: of the state, in ``kept``.
        kept: after the change.
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
    """Return a name of ``kept`` with the line that sets the attribute, where that is found."""
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
    """Return the number of the last line that sets an attribute or calls something of it."""
    sets = re.compile(rf"\.{attribute}\b\s*([-+*/|&^%@]|//|\*\*)?=[^=]|\.{attribute}\b[.\[]")
    found = [number for number, line in enumerate(lines) if sets.search(line)]
    return found[-1] if found else None
