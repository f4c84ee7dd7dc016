"""What followed code may do that no node has: set attributes, draw numbers, switch modes.

A stage makes the calls that were noted and runs no line of the forward in between. So whatever else
the lines did is found here, and the model is not cut there.
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

_OUTSIDE = Path(torch.__file__).parent, Path(__file__).parents[2]  # of what is user code
_LIBRARY = Path(os.__file__).parent


class Attributes:
    """What modules have as attributes, to be given back to them.

    Args:
        modules: by name.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._before = {n: [dict(t) for t in _tables(m)] for n, m in modules.items()}

    def restore(self) -> list[str]:
        """Give them back what they had, and return the names of what was set since."""
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
    """Within the block note the lines of this thread that draw from Python's or NumPy's generators.

    Where generators are does not tell: those who load rows draw from them too, in other threads.
    Calls of Python's are seen by a profile function. NumPy's are not, so the functions of its
    module are others meanwhile; a ``numpy.random.Generator`` of the user's own is not noticed.

    Args:
        is_noting: whether code is being followed, by this thread.
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
    """Return whether autocast is on, and its dtype, of each of ``device_types()``."""
    return tuple(
        (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in device_types()
    )


def line_here() -> str:
    """Return the line of user code that is being run."""
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
    """Whether a file is neither torch's, nor Python's, nor of this package."""
    path = Path(filename)
    if filename.startswith("<") or any(path.is_relative_to(folder) for folder in _OUTSIDE):
        return False
    return "site-packages" in path.parts or not path.is_relative_to(_LIBRARY)
