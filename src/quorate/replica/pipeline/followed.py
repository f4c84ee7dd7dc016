"""Side effects of followed code without a node: set attributes, drawn numbers, switched modes.

A stage makes the recorded calls and runs no line of forward between them. So all other effects of
these lines are detected in this file, and then the model is not cut there.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import numpy as np
import torch
from torch import nn

from quorate.machine.devices import device_types

_OUTSIDE = Path(torch.__file__).parent, Path(__file__).parents[2]  # folders without user code
_LIBRARY = Path(os.__file__).parent


class ModuleAttributes:
    """The attributes of modules, to be restored.

    Args:
        modules: modules by name.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._before = {n: [dict(t) for t in _tables(m)] for n, m in modules.items()}

    def restore(self) -> list[str]:
        """Restore the attributes, and return the names of attributes set since."""
        found = []
        for name, module in self._modules.items():
            tables = _tables(module)
            for table, before in zip(tables, self._before[name], strict=True):
                keys = {**before, **table}
                changed = [k for k in keys if table.get(k) is not before.get(k)]
                if changed:
                    table.clear()
                    table.update(before)
                found += [f"{name}.{key}".lstrip(".") for key in changed]
        return found


def _tables(module: nn.Module) -> list[dict[str, Any]]:
    own = vars(module)
    return [own, *(own[name] for name in ("_parameters", "_buffers", "_modules"))]


@contextmanager
def noticing_draws(is_noting: Callable[[], bool]) -> Iterator[list[str]]:
    """Yield a list of this thread's lines that draw from Python's or NumPy's generators.

    Comparing generators would not do: loader threads draw from them too. Calls of Python's
    generators are seen by a profile function. NumPy's are not, so the functions of its module are
    replaced meanwhile; a ``numpy.random.Generator`` of the user is not noticed.

    Args:
        is_noting: returns whether this thread is following code.
    """
    lines: list[str] = []
    before = sys.getprofile()

    def note() -> None:
        if is_noting():
            lines.append(line_here())

    def called(_frame: FrameType, event: str, function: Any) -> None:
        if event == "c_call" and isinstance(getattr(function, "__self__", None), random.Random):
            note()

    def noticed(function: Callable[..., Any]) -> Callable[..., Any]:
        def drawn(*args: Any, **kwargs: Any) -> Any:
            note()
            return function(*args, **kwargs)

        return drawn

    functions = {
        name: function
        for name, function in vars(np.random).items()
        if isinstance(getattr(function, "__self__", None), np.random.RandomState)
    }
    for name, function in functions.items():
        setattr(np.random, name, noticed(function))
    sys.setprofile(called)
    try:
        yield lines
    finally:
        sys.setprofile(before)
        for name, function in functions.items():
            setattr(np.random, name, function)


def autocast() -> tuple[tuple[bool, torch.dtype], ...]:
    """Return whether autocast is on, and its dtype, for each of ``device_types()``."""
    return tuple(
        (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in device_types()
    )


def line_here() -> str:
    """Return the current line of user code."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        if is_users(frame.f_code.co_filename):
            return f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}"
        frame = frame.f_back
    return "forward"


def line_of(trace: TracebackType | None) -> str:
    """Return the innermost line of user code in a traceback."""
    found = "forward"
    while trace is not None:
        if is_users(trace.tb_frame.f_code.co_filename):
            found = f"{Path(trace.tb_frame.f_code.co_filename).name}, line {trace.tb_lineno}"
        trace = trace.tb_next
    return found


@cache
def is_users(filename: str) -> bool:
    """Return whether a file is neither torch's, nor Python's, nor of this package."""
    path = Path(filename)
    if filename.startswith("<") or any(path.is_relative_to(folder) for folder in _OUTSIDE):
        return False
    return "site-packages" in path.parts or not path.is_relative_to(_LIBRARY)
