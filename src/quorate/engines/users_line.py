"""The line of the user's code that something goes back to: "train.py:12"."""

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
    """Return where an exception was raised, as far as that is the user's code; else "a library"."""
    frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    return _line(reversed(frames))


def line_of_caller(frame: FrameType | None) -> str:
    """Return the same of a call, whose frame this is or is called by."""
    return _line(traceback.walk_stack(frame))


def _line(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Args: the innermost frame first, each with its line."""
    for frame, line in frames:
        file = frame.f_code.co_filename
        is_installed = any(part in file for part in _INSTALLED)
        if not is_installed and not file.startswith(_LIBRARIES):
            return f"{Path(file).name}:{line}"
    return "a library"
