"""Settings: what a user types at the command beats what the script passes to ``Trainer``."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

from quorate.errors import SettingError

T = TypeVar("T")

_overrides: ContextVar[Mapping[str, Any]] = ContextVar("quorate_overrides")


@contextmanager
def overriding(options: Mapping[str, Any]) -> Iterator[None]:
    """Within the block every ``Trainer`` gets these options, whatever the script passes."""
    token = _overrides.set(options)
    try:
        yield
    finally:
        _overrides.reset(token)


def setting(name: str, passed: T) -> T:
    """The value of an option: the command's, if one was given, else the script's."""
    value: T = _overrides.get({}).get(name, passed)
    return value


def whole(name: str, value: object, *, least: int) -> int:
    """Check a whole number.

    Raises:
        SettingError: it is no integer, or too small.
    """
    expected = f"a whole number >= {least}"
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # NumPy's integers too
    except TypeError:
        raise SettingError(name, value, expected, f"pass {name} as an int") from None
    if isinstance(value, bool):
        raise SettingError(name, value, expected, f"pass {name} as an int")
    if number < least:
        raise SettingError(name, value, expected, "choose a larger one")
    return number


def real(name: str, value: object, *, above: float, below: float = float("inf")) -> float:
    """Check a real number between two bounds, both excluded.

    Raises:
        SettingError: it is no number, or out of bounds.
    """
    expected = f"a number > {above:g}" + ("" if below == float("inf") else f" and < {below:g}")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise SettingError(name, value, expected, f"pass {name} as a float")
    if not above < value < below:
        raise SettingError(name, value, expected, "choose one between the bounds")
    return float(value)


def one_of(name: str, value: str, choices: Sequence[str]) -> str:
    """Check a word.

    Raises:
        SettingError: it is none of these.
    """
    if value not in choices:
        raise SettingError(name, value, " or ".join(choices), "choose one of them")
    return value


def function(name: str, value: T, expected: str) -> T:
    """Check that something can be called.

    Raises:
        SettingError: it cannot.
    """
    if not callable(value):
        kind = type(value).__name__
        raise SettingError(name, kind, f"a function {expected}", "see help(quorate.Trainer)")
    return value


def directory(name: str, value: object) -> Path | None:
    """Check the name of a directory that exists or can be made; None is no directory.

    Raises:
        SettingError: it is no path, or there is a file in its place.
    """
    expected = "the path of a directory"
    if value is None:
        return None
    if not isinstance(value, (str, Path)) or not str(value):
        raise SettingError(name, value, expected, "leave it out to save nothing")
    path = Path(value)
    nearest = next(place for place in (path, *path.absolute().parents) if place.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise SettingError(name, str(value), expected, f"{nearest} cannot be written to")
    return path
