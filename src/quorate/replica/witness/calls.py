"""Two traces of the same computation, operator by operator: which call is to blame.

Pure: lists of calls in, a finding out. Digests stand for tensors.

What differs in the results is followed backwards: through the call that made it, to those of that
call's inputs that differ, to the calls that made these. A call that made something else of the same
inputs is to blame; so is the first that was given something that no operator made, also where it
rounded the difference away: in backward the same number may count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

RESULT = "result"  # other results from the same inputs
MEMORY = "memory"  # what it returned was read before it was written
NUMBER = "number"  # it was given another number, which no operator made
TENSOR = "tensor"  # ... another tensor
OPERATOR = "operator"  # another operator was called in its place

Pair = tuple[str, str]


@dataclass(frozen=True)
class Call:
    """One operator, as it was called. Values are texts by ``pieces``."""

    operator: str
    inputs: Sequence[str]  # values and numbers, in order, but for what it only writes
    outputs: Sequence[str]  # what it returned, and what it wrote
    module: str = ""  # the innermost module of the model that it was called in; "" is the model
    kind: str = ""  # its class; "" outside of any module
    line: str = ""  # of the script or a library: "train.py:31"
    source: str = ""
    is_empty: bool = False  # it returns memory as it was found
    is_random: bool = False  # it draws
    own_generator: bool = False  # it was given a generator that is not the shard's stream
    in_backward: bool = False


@dataclass(frozen=True)
class CallRecord:
    """An operator that two computations of one shard parted at, or the call that it was given."""

    why: str  # see ``calls``
    operator: str
    other: str  # that was called in the second computation; the same but for "another operator"
    module: str
    kind: str  # the module's class
    line: str  # "train.py:31"
    source: str  # the text of that line
    values: tuple[str, str]  # what differed
    is_random: bool  # whether it draws
    own_generator: bool  # whether it drew from a generator that the script made
    in_backward: bool


def paired(first: Mapping[str, str], second: Mapping[str, str]) -> dict[str, Pair]:
    """Return the results of two computations, by name."""
    return {name: (text, second.get(name, "")) for name, text in first.items()}


def culprit(
    first: Sequence[Call], second: Sequence[Call], results: Mapping[str, Pair]
) -> CallRecord | None:
    """Return the earliest call that two computations of the same shard part at.

    Args:
        first, second: the calls of each, in order.
        results: of each, by name. Where all are equal nobody is to blame.
    """
    wanted = {pair for pair in results.values() if pair[0] != pair[1]}
    if not wanted:
        return None
    together = next(
        (n for n, (a, b) in enumerate(zip(first, second, strict=False)) if _are_others(a, b)),
        min(len(first), len(second)),
    )
    pairs = list(zip(first[:together], second[:together], strict=True))
    if together < max(len(first), len(second)):
        # The course of the computation is another from here on, by something that differs before.
        wanted = {p for a, b in pairs if not a.is_empty for p in _differing("outputs", a, b)}
    if (earliest := _earliest(pairs, wanted)) is not None:
        return earliest
    if together < min(len(first), len(second)):
        a, b = first[together], second[together]
        return _record(OPERATOR, a, b, (a.operator, b.operator))
    return None


def _are_others(a: Call, b: Call) -> bool:
    return (a.operator, len(a.inputs), len(a.outputs)) != (
        b.operator,
        len(b.inputs),
        len(b.outputs),
    )


def _differing(which: str, a: Call, b: Call) -> Iterator[Pair]:
    for pair in zip(getattr(a, which), getattr(b, which), strict=True):
        if pair[0] != pair[1]:
            yield pair


def _earliest(pairs: Sequence[tuple[Call, Call]], wanted: set[Pair]) -> CallRecord | None:
    """Return the earliest call that what is wanted leads back to."""
    earliest: CallRecord | None = None
    results: list[set[Pair]] = [set()]  # before each call, of the calls so far
    for a, b in pairs:
        more = set(_differing("outputs", a, b)) if a.outputs != b.outputs else set()
        results.append(results[-1] | more if more else results[-1])
    entered: set[Pair] = set()  # given to a call that counts, and made by none
    for number in range(len(pairs) - 1, -1, -1):
        a, b = pairs[number]
        given = list(_differing("inputs", a, b)) if a.inputs != b.inputs else []
        foreign = [pair for pair in given if pair not in results[number]]
        if wanted.isdisjoint(_differing("outputs", a, b)):
            # It rounded the difference away, and kept what it was given for backward.
            foreign = [pair for pair in foreign if pair in entered]
        elif given:
            wanted |= set(given)
        else:
            why = MEMORY if a.is_empty else RESULT
            earliest = _record(why, a, b, next(_differing("outputs", a, b)))
        if foreign:
            earliest = _record(TENSOR if "[" in foreign[0][0] else NUMBER, a, b, foreign[0])
            entered |= set(foreign)
    return earliest


def _record(why: str, a: Call, b: Call, values: Pair) -> CallRecord:
    return CallRecord(
        why=why,
        operator=a.operator,
        other=b.operator,
        module=a.module,
        kind=a.kind,
        line=a.line,
        source=a.source,
        values=values,
        is_random=a.is_random,
        own_generator=a.own_generator,
        in_backward=a.in_backward,
    )
