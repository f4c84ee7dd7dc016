"""Settings: fields of frozen dataclasses, each declared once with the help, flag and check.

A value typed at the command has priority over the script's argument of ``Trainer``: ``resolved``
replaces each field that has a flag. The command's flags, the comparison at a resume and the answers
to old names of settings are derived from the same fields.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from enum import Enum
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from quorate.errors import SettingError, UserError, cure

T = TypeVar("T")
P = ParamSpec("P")
S = TypeVar("S", bound="Settings")

_overrides: ContextVar[Mapping[str, Any]] = ContextVar("quorate_overrides")


NONE = "none"  # text typed at the command for a number that a script sets to None


class AtResume(Enum):
    """The treatment of a setting that differs from the run's checkpoint."""

    REFUSED = "refused"  # refused: the value would make a different run
    SAID = "said"  # the run resumes with a message: bits may differ from then on


@dataclass(frozen=True)
class Option:
    """The description of a setting, apart from its value."""

    name: str  # at the command ("--worker-timeout-s"), and in old versions of Trainer
    help: str  # one line
    kind: type | None  # int, float, str, bool; None: no flag
    metavar: str | None
    check: Callable[[str, Any], Any] | None  # (name, value) -> value to store
    at_resume: AtResume | None  # None: the setting may change
    recorded: str  # name in a checkpoint
    seen: Callable[[Any], Any]  # turns the value into JSON for a checkpoint
    place: str = ""  # place in a script: "Workers(timeout_s=)"
    may_be_none: bool = False  # whether NONE at the command means None, for a number


REQUIRED: Any = MISSING  # the default of a field without one


def declare(
    default: Any,
    help: str,
    *,
    name: str = "",
    kind: type | None = None,
    metavar: str | None = None,
    check: Callable[[str, Any], Any] | None = None,
    at_resume: AtResume | None = None,
    recorded: str = "",
    seen: Callable[[Any], Any] = lambda value: value,
) -> Any:
    """Return a field of a dataclass with an option; see ``Option``.

    Args:
        default: the default of the field, or ``REQUIRED``.
    """
    option = Option(name, help, kind, metavar, check, at_resume, recorded, seen)
    return field(default=default, metadata={"option": option})


@dataclass(frozen=True)
class Settings:
    """The base of a group of settings: checks its values."""

    def __post_init__(self) -> None:
        typed = _overrides.get({})
        optional = {f.name for f in fields(self) if str(f.type).endswith("| None")}
        for name, option in options(type(self)).items():
            value = getattr(self, name)
            if option.check is None or (value is None and name in optional):
                continue
            # A plain value of the first field stands for the group, under the option's name; and an
            # error about a value typed at the command has the name used there.
            is_known = name in (option.name, fields(self)[0].name) or option.name in typed
            label = option.name if is_known else f"{type(self).__name__}.{name}"
            object.__setattr__(self, name, option.check(label, value))


def options(group: type[Settings], place: str = "") -> dict[str, Option]:
    """Return a group's options by the names of its fields, in their order.

    Args:
        place: the call in a script. Default: the name of the class.
    """
    optional = {field.name for field in fields(group) if str(field.type).endswith("| None")}
    described = {field.name: option for field in fields(group) if (option := _option(field))}
    return {
        name: replace(
            option,
            name=option.name or name,
            recorded=option.recorded or option.name or name,
            place=f"{place or group.__name__}({name}=)",
            may_be_none=option.kind in (int, float) and name in optional,
        )
        for name, option in described.items()
    }


@contextmanager
def overriding(values: Mapping[str, Any]) -> Iterator[None]:
    """Override settings within the block, by their options' names, regardless of arguments."""
    token = _overrides.set(values)
    try:
        yield
    finally:
        _overrides.reset(token)


def setting(name: str, passed: T) -> T:
    """Return the value of a setting: the command's, if typed, else the script's."""
    value: T = _overrides.get({}).get(name, passed)
    return value


def resolved(group: type[S], value: object) -> S:
    """Return a group of settings: the script's values, replaced by values typed at the command.

    Args:
        value: a group, or the plain value of its first field; None is a group of defaults if all
            fields have defaults.

    Raises:
        SettingError: a value is not valid.
    """
    if isinstance(value, group):
        passed = value
    elif value is None and _has_defaults(group):
        passed = group()
    else:
        passed = group(value)  # type: ignore[call-arg]
    typed = _overrides.get({})
    given = {
        field: None if option.may_be_none and typed[option.name] == NONE else typed[option.name]
        for field, option in options(group).items()
        if option.name in typed
    }
    return replace(passed, **given) if given else passed


def explain_keywords(
    places: Mapping[str, str],
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function so that an unknown keyword raises a ``SettingError`` with a remedy.

    Args:
        places: maps keywords of earlier versions and other trainers to the place of the setting.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        code = function.__code__
        known = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
        unnamed = code.co_argcount - 1  # number of positional arguments
        parameters = [signature(function).parameters[name] for name in known]
        required = [p.name for p in parameters if p.default is p.empty]
        called = function.__name__.replace("__init__", "Trainer")

        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> T:
            for name, value in kwargs.items():
                if name in known:
                    continue
                if name in places:
                    raise SettingError(name, value, places[name], "set it there")
                fix = cure(name, [*known, *places], f"the keywords are {', '.join(known)}")
                raise SettingError(name, value, f"a keyword of {called}", fix)
            if len(args) - 1 > unnamed:
                those = ", ".join(known[:unnamed])
                raise UserError(
                    called,
                    got=f"{len(args) - 1} arguments without a name",
                    expected=f"at most {unnamed} ({those})",
                    fix="pass the others by name",
                )
            for name in required[len(args) - 1 :]:
                if name not in kwargs:
                    raise UserError(name, got="nothing", fix="pass it, see help(quorate.Trainer)")
            return function(*args, **kwargs)

        return checked

    return decorate


def _option(field: Field[Any]) -> Option | None:
    option: Option | None = field.metadata.get("option")
    return option


def _has_defaults(group: type[Settings]) -> bool:
    return all(f.default is not MISSING or f.default_factory is not MISSING for f in fields(group))


# --- checks: functions of a name, for messages, and a value; each returns the value to store ------


def integer(name: str, value: object, *, least: int, most: int | None = None, fix: str = "") -> int:
    """Check a whole number.

    Args:
        fix: the remedy for any other value; by default, it depends on the value.

    Raises:
        SettingError: the value is no integer, too small or too large.
    """
    expected = f"a whole number >= {least}" + ("" if most is None else f" and <= {most}")
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # NumPy's integers too
    except TypeError:
        raise SettingError(name, value, expected, fix or f"pass {name} as an int") from None
    if isinstance(value, bool):
        raise SettingError(name, value, expected, fix or f"pass {name} as an int")
    if number < least:
        raise SettingError(name, value, expected, fix or "choose a larger one")
    if most is not None and number > most:
        raise SettingError(name, value, expected, fix or "choose a smaller one")
    return number


def at_least(least: int, most: int | None = None) -> Callable[[str, Any], int]:
    """Return the check of a whole number."""
    return lambda name, value: integer(name, value, least=least, most=most)


def real(name: str, value: object, *, above: float, below: float = float("inf")) -> float:
    """Check a real number between two bounds, both excluded.

    Raises:
        SettingError: the value is no number, or out of bounds.
    """
    expected = f"a number > {above:g}" + ("" if below == float("inf") else f" and < {below:g}")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise SettingError(name, value, expected, f"pass {name} as a float")
    if not above < value < below:
        fix = "choose a larger one" if value <= above else "choose a smaller one"
        fix = "it is no number: pass one" if value != value else fix
        raise SettingError(name, value, expected, fix)
    return float(value)


def between(above: float, below: float = float("inf")) -> Callable[[str, Any], float]:
    """Return the check of a real number between two bounds, both excluded."""
    return lambda name, value: real(name, value, above=above, below=below)


def one_of(name: str, value: str, choices: Sequence[str]) -> str:
    """Check a word.

    Raises:
        SettingError: the word is not among the choices.
    """
    if value not in choices:
        raise SettingError(name, value, " or ".join(choices), cure(value, choices))
    return value


def function(
    name: str, value: T, expected: str, arguments: int, fix: str = "see help(quorate.Trainer)"
) -> T:
    """Check that a value is callable with so many positional arguments.

    Args:
        fix: the remedy for a value that is no function.

    Raises:
        SettingError: the value is not callable in this way.
    """
    expected = f"a function {expected}"
    if not callable(value):
        raise SettingError(name, type(value).__name__, expected, fix)
    try:
        takes = signature(value)
    except (TypeError, ValueError):  # a callable without a signature, not written in Python
        return value
    try:
        takes.bind(*range(arguments))
    except TypeError as error:
        fix = f"have it take {arguments} positional argument{'s' if arguments > 1 else ''}"
        got = f"{getattr(value, '__name__', type(value).__name__)}{takes}"
        raise SettingError(name, got, f"{expected} ({error})", fix) from None
    return value


def a_function(expected: str, arguments: int = 1) -> Callable[[str, T], T]:
    """Return the check of a value callable with so many positional arguments.

    Args:
        expected: completes "a function ...".
    """
    return lambda name, value: function(name, value, expected, arguments)


def switch(name: str, value: object) -> bool:
    """Check a switch, and return whether the switch is on.

    Raises:
        SettingError: the value is no truth value: "no" would count as true in Python.
    """
    # NumPy's truth value is no bool; its type is called bool_ before NumPy 2, bool from then on.
    is_whole = isinstance(value, int) and value in (0, 1)
    if not is_whole and type(value).__name__ not in ("bool", "bool_"):
        raise SettingError(name, value, "True or False", "pass a bool")
    return bool(value)


def file_or_directory(name: str, value: object) -> Path | str:
    """Check the type of the path of a file or directory.

    Raises:
        SettingError: the value is no path.
    """
    if not isinstance(value, (str, os.PathLike)) or not str(value) or "\0" in str(value):
        raise SettingError(name, value, "the path of a file or directory", "pass a str or a Path")
    return value if isinstance(value, str) else Path(value)


def directory(name: str, value: object) -> Path | None:
    """Check the path of a directory that exists or can be made; None is no directory.

    Raises:
        SettingError: the value is no path, or the path leads to a file or an unwritable directory.
    """
    expected = "the path of a directory"
    if value is None:
        return None
    if not isinstance(value, (str, Path)) or not str(value) or "\0" in str(value):
        raise SettingError(name, value, expected, "leave it out to save nothing")
    path = Path(value)
    try:
        places = (path, *path.absolute().parents)
    except FileNotFoundError:
        fix = "the current folder was deleted: cd to another"
        raise SettingError(name, str(value), expected, fix) from None
    nearest = next(place for place in places if os.path.lexists(place))
    try:
        is_directory = nearest.is_dir()
    except OSError as error:
        why = f"{nearest}: {error.strerror or error}"
        raise SettingError(name, str(value), expected, why) from error
    if not is_directory:
        # The target of a dangling link may exist on an unmounted disk: never start a run in its
        # place.
        is_link = nearest.is_symlink() and not nearest.exists()
        why = (
            "is a link that leads nowhere: is a disk not mounted?"
            if is_link
            else "is not a directory"
        )
        raise SettingError(name, str(value), expected, f"{nearest} {why}")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise SettingError(name, str(value), expected, f"{nearest} cannot be written to")
    try:
        path.lstat()
    except FileNotFoundError:
        pass  # the directory will be made later
    except OSError as error:  # a name too long, say
        raise SettingError(name, str(value), expected, error.strerror or str(error)) from error
    return path
