"""Shared values in compiled code: numbers that are not constants of a graph, tensors, modules.

A graph is compiled for all values of a number. torch has symbolic numbers for integers only, so a
float is passed as three integers, a mantissa and two powers of two, whose quotient equals the float
exactly. Decisions in Python that depend on a number have a graph per outcome; a text, a ``bool`` or
``None`` is compiled into the graph. The graph of a shard follows from the values, and not from the
graphs compiled before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

# torch compiles 0 and 1 into a graph: the addition avoids both.
_ADDED = 1 << 40
_LARGEST = 1 << 53  # magnitude of integers
_DIGITS, _MOST_HALVINGS = 53, 60  # of a float64; of one power of two


class HandedOver(NamedTuple):
    """Values by ``name.key``, in the form for compiled code."""

    integers: dict[str, Any]
    quotients: dict[str, tuple[Any, Any, Any]]
    others: dict[str, Any]


def handed_over(values: Mapping[str, Any], later: int = 0) -> HandedOver:
    """Return the argument of ``begin`` in compiled code.

    Args:
        values: values by ``name.key``, on the device of the replica.
        later: number of units in the last place to move floats towards zero (zero: away from it),
            for trials with changed values.
    """
    from torch.fx.experimental.sym_node import DynamicInt  # a slow import, rarely needed

    found = HandedOver({}, {}, {})
    for where, value in values.items():
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _LARGEST:
            found.integers[where] = DynamicInt(value + _ADDED)
        elif isinstance(value, float) and (three := _three(value, later)) is not None:
            first, second, third = (DynamicInt(number + _ADDED) for number in three)
            found.quotients[where] = first, second, third
        else:
            found.others[where] = value
    return found


def _three(value: float, later: int) -> tuple[int, int, int] | None:
    """Return n, a and b with value = n / a / b; None for infinities, -0.0 or 1e300, for example."""
    if not math.isfinite(value) or (value == 0 and math.copysign(1, value) < 0):
        return None
    fraction, exponent = math.frexp(value)
    halvings = _DIGITS - exponent
    if not 0 <= halvings <= 2 * _MOST_HALVINGS:
        return None
    mantissa = int(fraction * (1 << _DIGITS))
    mantissa += later if mantissa <= 0 else -later
    first = min(halvings, _MOST_HALVINGS)
    return mantissa, 1 << first, 1 << (halvings - first)


# --- while torch traces code ----------------------------------------------------------------------

# Set and reset within one graph: torch traces both, and outside of a graph every thread sees None.
# So no code may run outside of the graph: code with a ``Shared`` is compiled as a whole or not at
# all.
_values: dict[str, Any] | None = None


def begin(handed: HandedOver | None) -> None:
    """Let the following code read the given values; None: end this."""
    global _values
    if handed is None:
        _values = None
        return
    found = {**handed.others}
    for where, number in handed.integers.items():
        found[where] = number - _ADDED
    for where, (first, second, third) in handed.quotients.items():
        found[where] = (first - _ADDED) / (second - _ADDED) / (third - _ADDED)
    _values = found


def values() -> dict[str, Any] | None:
    """Return the values by ``name.key``; None in code that is not being traced."""
    return _values
