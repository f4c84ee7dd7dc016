"""JSON accepted by every reader, including numbers that are not finite.

JSON has neither NaN nor infinity, but Python writes both: jq, JavaScript and strict readers refuse
a line with ``NaN``. This module writes such numbers as strings, like protobuf's JSON, and ``float``
converts the strings back.
"""

from __future__ import annotations

import json
import math
from typing import Any

NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def dumped(value: Any, indent: int | None = None) -> str:
    """Return a value as JSON, with the strings "NaN", "Infinity" and "-Infinity" where needed.

    Args:
        value: a value of dicts, lists, tuples and other types of ``json``.
        indent: spaces per level; None: on one line.
    """
    try:
        return json.dumps(value, allow_nan=False, indent=indent)
    except ValueError:  # usually all numbers are finite, and no search is needed
        return json.dumps(_in_words(value), allow_nan=False, indent=indent)


def number(value: object) -> float | None:
    """Return a number read from JSON, including the strings written by ``dumped``.

    Returns None for a value other than a number, and for an integer too large for a float. Python's
    reader also accepts the ``NaN`` of older files.
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
