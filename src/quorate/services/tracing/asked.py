"""What is asked for of a trace: into which file, and which steps. Checks of these settings."""

from __future__ import annotations

import re
from pathlib import Path

from quorate.errors import SettingError
from quorate.machine.regular_file import is_folder, reason_against_new_file

ALL = "0:"

_LAST_STEP = 1 << 62  # beyond any
_STEPS = re.compile(r"[0-9]{1,18}:[0-9]{0,18}|:[0-9]{1,18}")


def steps(name: str, value: object) -> str:
    """Check a range of steps.

    Raises:
        SettingError: it is none, or has no step.
    """
    expected = "two whole numbers A:B, A below B: steps from A to before B"
    if not isinstance(value, str) or not _STEPS.fullmatch(value):
        raise SettingError(name, value, expected, "write 100:110")
    if not steps_between(value):
        raise SettingError(name, value, expected, "there is no step in it")
    return value


def steps_between(text: str) -> range:
    """Return the steps of ``A:B``, of which either may be left out."""
    first, _, last = text.partition(":")
    return range(int(first or 0), int(last or _LAST_STEP))


def new_file(name: str, value: object) -> Path:
    """Check the path of a file that is to be written, or replaced.

    Raises:
        SettingError: it is no path, there is a directory, or no folder for it.
    """
    expected = "the path of a file in a folder that there is"
    if not isinstance(value, (str, Path)) or not str(value) or "\0" in str(value):
        raise SettingError(name, value, expected, "pass a str or a Path")
    path = Path(value)
    if is_folder(path):
        fix: str | None = "it is a folder: name a file in it"
    elif not is_folder(path.absolute().parent):
        fix = "make the folder first"
    else:
        fix = reason_against_new_file(path)
    if fix is not None:
        raise SettingError(name, str(value), expected, fix)
    return path
