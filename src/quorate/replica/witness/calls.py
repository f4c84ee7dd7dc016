"""Two traces of the same computation, operator by operator, to find the call to blame.

Pure: lists of calls in, a finding out. Digests stand for tensors.

A difference in the results is traced back: from the call that made the result, to the differing
inputs of the call, to the calls that made the inputs. To blame is a call with different outputs for
the same inputs; or the first call with a differing input not made by any operator, even if the call
rounded the difference away, because the input may be used again in backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

RESULT = "result"  # other results from the same inputs
MEMORY = "memory"  # output read before any write
NUMBER = "number"  # a number among its inputs differs, made by no operator
TENSOR = "tensor"  # ... a tensor
OPERATOR = "operator"  # another operator was called instead

Pair = tuple[str, str]


@dataclass(frozen=True)
class Call:
    """A call of an operator. Values are texts by ``pieces``."""

    operator: str
    inputs: Sequence[str]  # values and numbers, in order, without arguments that are only written
    outputs: Sequence[str]  # returned and written values
    module: str = ""  # innermost module of the model at the call; "" is the model
    kind: str = ""  # class of the module; "" outside of any module
    line: str = ""  # of the script or a library: "train.py:31"
    source: str = ""
    is_empty: bool = False  # returns uninitialised memory
    is_random: bool = False  # draws random numbers
    own_generator: bool = False  # received a generator other than the shard's stream
    in_backward: bool = False


@dataclass(frozen=True)
class CallRecord:
    """The operator or call at which two computations of a shard diverge."""

    why: str  # see the constants of this module
    operator: str
    other: str  # operator in the second computation; differs only for OPERATOR
    module: str
    kind: str  # the module's class
    line: str  # "train.py:31"
    source: str  # the text of the line
    values: tuple[str, str]  # the differing values
    is_random: bool  # whether the operator draws
    own_generator: bool  # whether it drew from a generator of the script
    in_backward: bool


def paired(first: Mapping[str, str], second: Mapping[str, str]) -> dict[str, Pair]:
    """Return the results of two computations, by name."""
    return {name: (text, second.get(name, "")) for name, text in first.items()}


def culprit(
    first: Sequence[Call], second: Sequence[Call], results: Mapping[str, Pair]
) -> CallRecord | None:
    """Return the earliest call at which two computations of the same shard diverge.

    Args:
        first, second: the calls of each, in order.
        results: the results of both, by name. If all are equal, no call is to blame.
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
        # From here on the computations take different courses, because of an earlier difference.
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
    """Return the earliest call from which the wanted differences follow."""
    earliest: CallRecord | None = None
    results: list[set[Pair]] = [set()]  # before each call: results of the calls so far
    for a, b in pairs:
        more = set(_differing("outputs", a, b)) if a.outputs != b.outputs else set()
        results.append(results[-1] | more if more else results[-1])
    entered: set[Pair] = set()  # inputs of relevant calls that no call has made
    for number in range(len(pairs) - 1, -1, -1):
        a, b = pairs[number]
        given = list(_differing("inputs", a, b)) if a.inputs != b.inputs else []
        foreign = [pair for pair in given if pair not in results[number]]
        if wanted.isdisjoint(_differing("outputs", a, b)):
            # The call rounded the difference away, and kept its input for backward.
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
