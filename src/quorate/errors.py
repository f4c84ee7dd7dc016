"""The exceptions of quorate, drawn as a tree.

::

    QuorateError
    ├── OneLineError             no traceback says more than its message; it has an exit code
    │   ├── UserError            the user can mend it: exit code 2
    │   │   ├── SettingError     an option: name, got, expected, what to do
    │   │   │   └── CopyError    a model that cannot be copied
    │   │   ├── DataError        a dataset or a file: where, got, expected
    │   │   ├── LossError        what the loss function returned
    │   │   ├── OutputError      what the function of a prediction returned, or a metric collects
    │   │   ├── CompileError     what torch.compile cannot compile
    │   │   ├── SharedError      a Shared: its names and values, or where it is read and set
    │   │   ├── InputError       a worker process that reads standard input
    │   │   ├── PackageError     a package of an extra is not installed
    │   │   └── CheckpointError  a saved state that is damaged or does not fit
    │   │       └── MisfitError  one that is sound, and of another run
    │   ├── ExitError            user code called sys.exit() in the middle of a shard
    │   ├── SaveError            a state that cannot be written to the disk
    │   ├── NotFiniteError       a loss or gradient that is no number, before the update
    │   ├── SameBitsError        a strict run that cannot have the same bits elsewhere
    │   ├── ServerError          a server of a Ray cluster is gone, with its slice of the parameters
    │   └── RunError             a run that a command started failed
    ├── WorkerError              workers ended, or raised what only they have a type for
    └── ProtocolError            a transport broke the coordinator's rules: a bug, with the events

The line of a ``OneLineError`` is made of parts: ``name: got ..., expected ...; fix``. The parts are
attributes too, for programs and tests that catch the exception.

An exception raised by the user's own code is none of these: it reaches the caller as it is, with a
note (PEP 678) that says worker, step, shard and rows.

A program that one of the first kind ends, as nobody catches it, shows its line and exits with its
code, under ``quorate run`` and as a plain script alike. What else ends a program is shown as ever.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

MOST_SHOWN = 200  # characters of a value that was got
FIRST, LAST = 8_000, 2_000  # characters of a text, which may be of megabytes: its ends

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]

_shown_before: Hook | None = None  # by whom exceptions were shown; None: nothing was changed yet


class QuorateError(Exception):
    """Whatever quorate itself raises."""


class OneLineError(QuorateError):
    """An error that ends a program with one line, and with ``exit_code``.

    The line is ``{name}: got {got}, expected {expected}; {fix}``, or ``{name}: {why}; {fix}``.
    Parts that are left out leave no trace in the line.

    Args:
        name: The setting, file, tensor or call that the error is about; or the whole sentence.
        why: What is wrong, where no value can be compared with an expected value.
        got: The value that was found, as text.
        expected: The values that would work, as text.
        fix: What the user can do, as an imperative.
    """

    exit_code = 1

    def __init__(
        self,
        name: object = "",
        why: object = "",
        *,
        got: object = None,
        expected: object = None,
        fix: str = "",
    ) -> None:
        self.name, self.why, self.fix = str(name), str(why), fix
        self.got, self.expected = got, expected
        values = {"got": got, "expected": expected}
        compared = ", ".join(
            f"{word} {value}" for word, value in values.items() if value is not None
        )
        said = ": ".join(part for part in (self.name, self.why, compared) if part)
        # Not by super().__init__(): OSError, a base of SaveError, ignores its arguments there.
        self.args = (f"{said}; {fix}" if fix else said,)

    @property
    def parts(self) -> dict[str, object]:
        """The parts by name, as other processes receive them."""
        return {part: portable(value) for part, value in vars(self).items() if part[0] != "_"}

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what a pickle or copy is made of: the line and the parts, not a call with them."""
        return _restored, (type(self), self.args), {**vars(self), **self.parts}

    def __new__(cls, *_args: object, **_kwargs: object) -> OneLineError:
        """Make one, and see to it that it will be shown in a line.

        Here, and not where a ``Trainer`` is made: a group of settings may refuse its values before
        there is any. A program that has none of these is left as it is.
        """
        show_one_line_errors()
        return super().__new__(cls)

    @property
    def line(self) -> str:
        """What is shown of it."""
        return cut(f"quorate: {' '.join(str(self).splitlines())}")

    def _render_traceback_(self, *_: object) -> list[str]:
        """Return what IPython shows, in notebooks too: IPython asks exceptions for it by this name.

        ``sys.last_value`` is the exception itself, with all frames.
        """
        return [self.line]


class UserError(OneLineError):
    """A mistake that the user can mend."""

    exit_code = 2


class SettingError(UserError):
    """An option has a value that cannot work."""

    def __init__(self, name: str, got: object, expected: str, fix: str) -> None:
        super().__init__(name, got=shown(got), expected=expected, fix=fix)
        self.got = got  # the value itself


class PackageError(UserError):
    """A package is not installed because the extra that has it was not asked for.

    Args:
        package: its name for pip.
        extra: the extra of quorate-torch that installs the package.
        purpose: what needs the package, as a plural noun: ``TFRecord files``.
    """

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        fix = f"pip install 'quorate-torch[{extra}]'"
        super().__init__(f"{purpose} need the package {package}, which is not installed", fix=fix)
        self.package, self.extra = package, extra


class CopyError(SettingError):
    """A model cannot be copied, and towers need a copy each."""

    reason = ""  # why not


class DataError(UserError):
    """A dataset or a data file is not what it should be."""

    def __init__(
        self,
        where: str | Path,
        *,
        got: object,
        expected: object,
        offset: int | None = None,
        fix: str = "",
    ) -> None:
        at = "" if offset is None else f" at byte {offset:,}"
        super().__init__(f"{where}{at}", got=str(got), expected=expected, fix=fix)
        self.name, self.where, self.offset, self.got = str(where), where, offset, got


class LossError(UserError):
    """The loss function returned something that cannot be trained on."""


class OutputError(UserError):
    """What is to be kept of each row is not by row, or not the same kind of thing for all rows."""


class CompileError(UserError):
    """The loss function cannot be compiled with the model, or has to be compiled too often."""

    def __init__(self, why: str, fix: str = "leave compile off") -> None:
        super().__init__("compile", why, fix=fix)


class CutError(UserError):
    """A model cannot be cut into stages as it is asked for, or a shard does not fit the cut."""

    def __init__(self, why: str, fix: str) -> None:
        super().__init__("split", why, fix=fix)


class SharedError(UserError):
    """A ``Shared`` has a name or a value that cannot be, or is read or set where it cannot be."""


class InputError(UserError, EOFError):
    """A worker process reads standard input, of which it has none: an end of file, and why."""


class CheckpointError(UserError):
    """A saved state is damaged, or does not fit this model and these settings."""


class MisfitError(CheckpointError):
    """A saved state is sound, and of another run: no checkpoint of this one can be like it."""


class ExitError(OneLineError):
    """User code that computes a shard called ``sys.exit()``, on any engine.

    A shard has no end of its own to choose: the run would seem to be done.
    """

    def __init__(self, name: str, exit_code: int = 1, *, why: str = "", fix: str = "") -> None:
        super().__init__(name, why, fix=fix)
        self.exit_code = exit_code  # as it was given; 1 where that would mean success


class NotFiniteError(OneLineError):
    """A loss or a gradient is infinite or not a number; the update was not made."""


class SaveError(OneLineError, OSError):
    """The state of a run cannot be written to the disk; older checkpoints are as they were."""

    def __init__(self, name: str, errno: int | None, *, why: object = "", fix: str = "") -> None:
        super().__init__(name, why, fix=fix)
        self.errno = errno  # of the failed write

    @property
    def parts(self) -> dict[str, object]:
        """The parts by name; ``errno`` is a slot of OSError."""
        return {**super().parts, "errno": self.errno}


class SameBitsError(OneLineError):
    """A run that was asked to be strict came upon a reason why its bits are not the same."""


class RunError(OneLineError):
    """A run that a command started in a process of its own failed, by the script's doing."""


class WorkerError(QuorateError):
    """Workers ended and no more can be started, or user code raised an exception of its own."""


class RankError(OneLineError):
    """Another rank of the collective is gone; what it had of the run went with it."""


class ServerError(OneLineError):
    """A process that makes updates is gone, and with it its slice or part of the state."""


class ProtocolError(QuorateError):
    """An event that cannot happen in the coordinator's present state."""

    def __init__(self, message: str, events: Iterable[object]) -> None:
        trail = "\n".join(f"  {event}" for event in events)
        super().__init__(f"{message}\nlast events, oldest first:\n{trail}")


def _restored(kind: type[OneLineError], args: tuple[object, ...]) -> OneLineError:
    error = kind.__new__(kind)
    error.args = args
    return error


def portable(value: object) -> object:
    """Return a value for another process: a plain value as it is, any other as text."""
    if isinstance(value, str | Path):
        return cut(str(value))
    return value if value is None or type(value) in (bool, int, float) else shown(value)


def shown(value: object) -> str:
    """Return a value for a message: one line of it, and not all of a large one."""
    try:
        text = " ".join(repr(value).split())
    except Exception as error:  # user code
        return f"<{type(value).__name__}, whose repr raised {type(error).__name__}>"
    if len(text) <= MOST_SHOWN:
        return text
    return f"{text[:MOST_SHOWN]}... ({len(text) - MOST_SHOWN:,} characters more)"


def nearest(word: object, known: Iterable[str]) -> str | None:
    """Return the one of some words that somebody meant who wrote another; None if none is near."""
    by_lower = {name.lower(): name for name in known}
    near = difflib.get_close_matches(str(word).lower(), by_lower, n=1)
    return by_lower[near[0]] if near else None


def cure(word: object, known: Iterable[str], otherwise: str = "choose one of them") -> str:
    """Return what to do about a word that is none of those known: ``did you mean sync?``."""
    near = nearest(word, known)
    return otherwise if near is None else f"did you mean {near}?"


def cut(text: str) -> str:
    """Return a text, without the middle of a very long one, and with how much that was."""
    if len(text) <= FIRST + LAST:
        return text
    left_out = len(text) - FIRST - LAST
    return f"{text[:FIRST]}... ({left_out:,} characters are left out) ...{text[-LAST:]}"


def show_one_line_errors() -> bool:
    """From now on, have a ``OneLineError`` that nobody catches end this program in its line.

    Returns:
        Whether other exceptions are shown by Python itself, and not as somebody else wants it.
    """
    global _shown_before
    if _shown_before is None:
        _shown_before, sys.excepthook = sys.excepthook, _show
    return _is_plain(_shown_before) and sys.excepthook is _show


def _is_plain(hook: Hook) -> bool:
    """Whether a hook shows what Python does: torch's adds the rank, once there is a group."""
    module = getattr(hook, "__module__", None) or ""
    return hook is sys.__excepthook__ or module.startswith("torch.distributed")


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    assert _shown_before is not None
    if not isinstance(error, OneLineError) or not _is_plain(_shown_before):
        _shown_before(kind, error, trace)  # whoever shows exceptions in another way shows all
    elif sys.stderr is not None:
        with suppress(OSError, ValueError):  # nobody is there to read it
            print(error.line, file=sys.stderr, flush=True)
    stays = sys.flags.inspect or sys.flags.interactive or hasattr(sys, "ps1")  # at its prompt
    if isinstance(error, OneLineError) and not stays:
        raise SystemExit(error.exit_code)
