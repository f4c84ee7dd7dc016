"""Shared values in compiled code: numbers that are no constants of a graph, tensors, modules.

A graph is made for all values of a number. torch has general numbers for integers alone, so that a
float is handed over as the three of which it is the quotient, exactly: a mantissa and two powers of
two. What Python decides by a number has a graph for each way, and a text, a ``bool`` or ``None`` is
compiled in. Which graph a shard has follows from the values, and not from what was compiled before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

# torch compiles 0 and 1 in: so that no integer is one of them.
_ADDED = 1 << 40
_LARGEST = 1 << 53  # of integers, in size
_DIGITS, _MOST_HALVINGS = 53, 60  # of a float64; of one power of two


class HandedOver(NamedTuple):
    """Values by ``name.key``, as compiled code is given them."""

    integers: dict[str, Any]
    quotients: dict[str, tuple[Any, Any, Any]]
    others: dict[str, Any]


def handed_over(values: Mapping[str, Any], later: int = 0) -> HandedOver:
    """Return what ``begin`` takes in compiled code.

    Args:
        values: by ``name.key``, on the device of the replica.
        later: by so many units in its last place a float is nearer to zero (zero: away from it).
    """
    from torch.fx.experimental.sym_node import DynamicInt  # takes its time, and few want it

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
    """Return n, a and b of value = n / a / b; None of what has none: infinities, -0.0, 1e300."""
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


# --- while torch looks through code ---------------------------------------------------------------

# Set and unset within one graph: torch follows both, and no thread ever has another value than
# None. So nothing may be outside of the graph: code with a ``Shared`` is compiled whole or not.
_values: dict[str, Any] | None = None


def begin(handed: HandedOver | None) -> None:
    """Have the code that follows read these values; None: no more."""
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
    """Return the values by ``name.key``; None if this is no code that torch looks through."""
    return _values
