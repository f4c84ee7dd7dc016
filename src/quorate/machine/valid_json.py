"""JSON that every reader takes, with numbers that are not finite.

JSON has neither NaN nor infinity, and Python writes them all the same: ``NaN`` makes a line that
jq, JavaScript and strict readers refuse. They are written as strings here, as protobuf's JSON does,
and ``float`` reads those back.
"""

from __future__ import annotations

import json
import math
from typing import Any

NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def dumped(value: Any, indent: int | None = None) -> str:
    """Return a value as JSON, with ``"NaN"``, ``"Infinity"`` or ``"-Infinity"`` where it is that.

    Args:
        value: of dicts, lists, tuples and what else ``json`` knows.
        indent: of each level; None: on one line.
    """
    try:
        return json.dumps(value, allow_nan=False, indent=indent)
    except ValueError:  # as a rule all are finite, and nothing is looked through
        return json.dumps(_in_words(value), allow_nan=False, indent=indent)


def number(value: object) -> float | None:
    """Return a number that was read from JSON, also one that ``dumped`` put into words.

    None where it is no number, or a whole one that no float can hold. Python's reader takes the
    ``NaN`` of older files for a number.
    """
    if isinstance(value, str):
        return NOT_FINITE.get(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def _in_words(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {_in_words(key): _in_words(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_in_words(inner) for inner in value]
    return value
