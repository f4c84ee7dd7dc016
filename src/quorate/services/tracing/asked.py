"""The settings of a trace: the file and the steps, with their checks."""

from __future__ import annotations

import re
from pathlib import Path

from quorate.errors import SettingError
from quorate.machine.regular_file import is_folder, reason_against_new_file

ALL = "0:"

_LAST_STEP = 1 << 62  # beyond any step
_STEPS = re.compile(r"[0-9]{1,18}:[0-9]{0,18}|:[0-9]{1,18}")


def steps(name: str, value: object) -> str:
    """Check a range of steps.

    Raises:
        SettingError: the value is not a range, or the range is empty.
    """
    expected = "two whole numbers A:B, A below B: steps from A to before B"
    if not isinstance(value, str) or not _STEPS.fullmatch(value):
        raise SettingError(name, value, expected, "write 100:110")
    if not steps_between(value):
        raise SettingError(name, value, expected, "there is no step in it")
    return value


def steps_between(text: str) -> range:
    """Return the steps of ``A:B``; A or B may be left out."""
    first, _, last = text.partition(":")
    return range(int(first or 0), int(last or _LAST_STEP))


def new_file(name: str, value: object) -> Path:
    """Check the path of a file to write or replace.

    Raises:
        SettingError: the value is no path, or names a directory, or the parent folder is missing.
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
