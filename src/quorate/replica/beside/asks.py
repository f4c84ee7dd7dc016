"""Detection of a loss function's third parameter, by the signature. Without torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def asks_for_at(function: Callable[..., Any]) -> bool:
    """Return whether a loss function takes the position of its shard, judged by the signature.

    A third positional parameter takes the position if called ``at``, or without a default value.
    ``*args`` does not count. Partials, bound methods, callable objects, modules and decorated
    functions are resolved as by ``inspect.signature``.
    """
    positional = _positional(function)
    if not positional and callable(forward := getattr(function, "forward", None)):
        positional = _positional(forward)  # of a module: its own __call__ takes any arguments
    if len(positional) < 3:
        return False
    third = positional[2]
    return third.name == "at" or third.default is third.empty


def _positional(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # functions in C, or of a script
        return []
    return [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
