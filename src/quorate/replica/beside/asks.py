"""What a loss function asks for beside model and batch, by its signature. Without torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def asks_for_at(function: Callable[..., Any]) -> bool:
    """Return whether a loss function wants to know where it is: by its signature.

    It does if it has a third positional parameter that is called ``at`` or has no default value.
    ``*args`` asks for nothing. Partials, bound methods, objects that can be called, modules and
    what a decorator wraps are looked through as ``inspect.signature`` does.
    """
    positional = _positional(function)
    if not positional and callable(forward := getattr(function, "forward", None)):
        positional = _positional(forward)  # of a module, whose own __call__ takes anything
    if len(positional) < 3:
        return False
    third = positional[2]
    return third.name == "at" or third.default is third.empty


def _positional(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of C, or of a script
        return []
    return [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
