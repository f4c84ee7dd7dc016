"""The line of user code responsible for a call or an exception: "train.py:12"."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

_LIBRARIES = (
    str(Path(__file__).parents[1]) + "/",  # this package
    *(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib")),
    "<",  # runpy, importlib: "<frozen ...>"
)
_INSTALLED = ("/site-packages/", "/dist-packages/")


def line_of_error(error: BaseException) -> str:
    """Return the innermost line of user code in a traceback; "a library" without user code."""
    frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    return _line(reversed(frames))


def line_of_caller(frame: FrameType | None) -> str:
    """Return the innermost line of user code in a call stack; "a library" without user code."""
    return _line(traceback.walk_stack(frame))


def users_frame(frames: Iterable[tuple[FrameType, int]]) -> tuple[FrameType, int] | None:
    """Return the first frame of user code with its line; None without user code.

    Args:
        frames: begin with the innermost frame.
    """
    for frame, line in frames:
        file = frame.f_code.co_filename
        is_installed = any(part in file for part in _INSTALLED)
        if not is_installed and not file.startswith(_LIBRARIES):
            return frame, line
    return None


def _line(frames: Iterable[tuple[FrameType, int]]) -> str:
    if (found := users_frame(frames)) is None:
        return "a library"
    frame, line = found
    return f"{Path(frame.f_code.co_filename).name}:{line}"
