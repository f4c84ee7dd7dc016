"""The exceptions of quorate, drawn as a tree.

::

    QuorateError
    ├── OneLineError             its message suffices without a traceback; has an exit code
    │   ├── UserError            a mistake that the user can fix: exit code 2
    │   │   ├── SettingError     an option: name, got, expected, fix
    │   │   │   └── CopyError    a model that cannot be copied
    │   │   ├── DataError        a dataset or a file: where, got, expected
    │   │   ├── LossError        an invalid result of the loss function
    │   │   ├── OutputError      an invalid output of a prediction, or input of a metric
    │   │   ├── CompileError     code that torch.compile cannot compile
    │   │   ├── SharedError      a Shared: names and values, or the place of access
    │   │   ├── InputError       a worker process that reads standard input
    │   │   ├── PackageError     a package of an extra is not installed
    │   │   └── CheckpointError  a saved state that is damaged or does not fit
    │   │       └── MisfitError  a sound state of a different run
    │   ├── ExitError            user code called sys.exit() in the middle of a shard
    │   ├── SaveError            a state that cannot be written to the disk
    │   ├── NotFiniteError       a loss or gradient that is no number, before the update
    │   ├── SameBitsError        a strict run that cannot have the same bits elsewhere
    │   ├── ServerError          a server of a Ray cluster is gone, with a slice of the parameters
    │   └── RunError             a run started by a command has failed
    ├── WorkerError              workers ended, or raised an exception of a type unknown outside
    └── ProtocolError            a transport broke the coordinator's rules: a bug, with the events

The line of a ``OneLineError`` is made of parts: ``name: got ..., expected ...; fix``. The parts are
attributes too, for programs and tests that catch the exception.

An exception raised by the user's own code is none of these: the caller receives the original
exception, with a note (PEP 678) that names worker, step, shard and rows.

An uncaught ``OneLineError`` prints its line and ends the program with its exit code, under
``quorate run`` and in a plain script alike. All other exceptions are shown by Python as usual.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

MOST_SHOWN = 200  # most characters of a value in a message
FIRST, LAST = 8_000, 2_000  # characters kept at both ends of a text, which may have megabytes

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]

_shown_before: Hook | None = None  # the hook before ours; None: not replaced yet


class QuorateError(Exception):
    """The base of all exceptions raised by quorate itself."""


class OneLineError(QuorateError):
    """An error that ends a program with one line, and with ``exit_code``.

    The line is ``{name}: got {got}, expected {expected}; {fix}``, or ``{name}: {why}; {fix}``. A
    missing part leaves no trace in the line.

    Args:
        name: the setting, file, tensor or call that the error is about; or the whole sentence.
        why: the fault, if no value can be compared with an expected value.
        got: the actual value, as text.
        expected: the valid values, as text.
        fix: the remedy for the user, as an imperative.
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
        # Not by super().__init__(): OSError, a base of SaveError, ignores arguments there.
        self.args = (f"{said}; {fix}" if fix else said,)

    @property
    def parts(self) -> dict[str, object]:
        """The parts by name, for other processes."""
        return {part: portable(value) for part, value in vars(self).items() if part[0] != "_"}

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the state for a pickle or copy: the line and the parts, not a call with them."""
        return _restored, (type(self), self.args), {**vars(self), **self.parts}

    def __new__(cls, *_args: object, **_kwargs: object) -> OneLineError:
        """Make an error, and install the hook that shows it as one line.

        The hook is not installed by ``Trainer``, because a group of settings may refuse its values
        before any trainer exists. A program without such an error keeps its hook.
        """
        show_one_line_errors()
        return super().__new__(cls)

    @property
    def line(self) -> str:
        """The text shown to the user."""
        return cut(f"quorate: {' '.join(str(self).splitlines())}")

    def _render_traceback_(self, *_: object) -> list[str]:
        """Return the text for IPython and notebooks: IPython calls a method of this name.

        ``sys.last_value`` is the exception itself, with all frames.
        """
        return [self.line]


class UserError(OneLineError):
    """A mistake that the user can fix."""

    exit_code = 2


class SettingError(UserError):
    """An invalid value of an option."""

    def __init__(self, name: str, got: object, expected: str, fix: str) -> None:
        super().__init__(name, got=shown(got), expected=expected, fix=fix)
        self.got = got  # the value itself


class PackageError(UserError):
    """A missing package, whose extra was not installed.

    Args:
        package: name of the package for pip.
        extra: the extra of quorate-torch that installs the package.
        purpose: the feature that needs the package, as a plural noun: ``TFRecord files``.
    """

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        fix = f"pip install 'quorate-torch[{extra}]'"
        super().__init__(f"{purpose} need the package {package}, which is not installed", fix=fix)
        self.package, self.extra = package, extra


class CopyError(SettingError):
    """A model that cannot be copied; towers need a copy each."""

    reason = ""  # the cause


class DataError(UserError):
    """An invalid dataset or data file."""

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
    """An invalid result of the loss function."""


class OutputError(UserError):
    """An output without a row dimension, or with different kinds for different rows."""


class CompileError(UserError):
    """A loss function that cannot be compiled with the model, or is compiled too often."""

    def __init__(self, why: str, fix: str = "leave compile off") -> None:
        super().__init__("compile", why, fix=fix)


class CutError(UserError):
    """A model that cannot be cut into the requested stages, or a shard unfit for the cut."""

    def __init__(self, why: str, fix: str) -> None:
        super().__init__("split", why, fix=fix)


class SharedError(UserError):
    """An invalid name or value of a ``Shared``, or an access in the wrong place."""


class InputError(UserError, EOFError):
    """A read of standard input by a worker process, which has none: an end of file."""


class CheckpointError(UserError):
    """A damaged saved state, or a state unfit for this model and these settings."""


class MisfitError(CheckpointError):
    """A sound saved state of another run, with other settings."""


class ExitError(OneLineError):
    """A call of ``sys.exit()`` by user code that computes a shard, on any engine.

    Without this error, the run would look finished although only a shard ended.
    """

    def __init__(self, name: str, exit_code: int = 1, *, why: str = "", fix: str = "") -> None:
        super().__init__(name, why, fix=fix)
        self.exit_code = exit_code  # the code of sys.exit(); 1 instead of 0


class NotFiniteError(OneLineError):
    """An infinite loss or gradient, or one that is not a number; the update was not made."""


class SaveError(OneLineError, OSError):
    """A failure to write the state of a run to the disk; older checkpoints are unchanged."""

    def __init__(self, name: str, errno: int | None, *, why: object = "", fix: str = "") -> None:
        super().__init__(name, why, fix=fix)
        self.errno = errno  # of the failed write

    @property
    def parts(self) -> dict[str, object]:
        """The parts by name; ``errno`` is a slot of OSError."""
        return {**super().parts, "errno": self.errno}


class SameBitsError(OneLineError):
    """A reason, found in a strict run, why the bits may differ on other workers."""


class RunError(OneLineError):
    """A failure of a run started by a command in a separate process, caused by the script."""


class WorkerError(QuorateError):
    """A loss of workers without replacement, or an exception of the user's own type."""


class RankError(OneLineError):
    """The loss of another rank of the collective, with its part of the run's state."""


class ServerError(OneLineError):
    """The loss of a process that makes updates, with its slice or part of the state."""


class ProtocolError(QuorateError):
    """An event that is impossible in the coordinator's current state."""

    def __init__(self, message: str, events: Iterable[object]) -> None:
        trail = "\n".join(f"  {event}" for event in events)
        super().__init__(f"{message}\nlast events, oldest first:\n{trail}")


def _restored(kind: type[OneLineError], args: tuple[object, ...]) -> OneLineError:
    error = kind.__new__(kind)
    error.args = args
    return error


def portable(value: object) -> object:
    """Return a value for another process: a plain value unchanged, any other value as text."""
    if isinstance(value, str | Path):
        return cut(str(value))
    return value if value is None or type(value) in (bool, int, float) else shown(value)


def shown(value: object) -> str:
    """Return a value for a message: on one line, and shortened."""
    try:
        text = " ".join(repr(value).split())
    except Exception as error:  # user code
        return f"<{type(value).__name__}, whose repr raised {type(error).__name__}>"
    if len(text) <= MOST_SHOWN:
        return text
    return f"{text[:MOST_SHOWN]}... ({len(text) - MOST_SHOWN:,} characters more)"


def nearest(word: object, known: Iterable[str]) -> str | None:
    """Return the known word most similar to a misspelled word; None if no word is similar."""
    by_lower = {name.lower(): name for name in known}
    near = difflib.get_close_matches(str(word).lower(), by_lower, n=1)
    return by_lower[near[0]] if near else None


def cure(word: object, known: Iterable[str], otherwise: str = "choose one of them") -> str:
    """Return the remedy for an unknown word: ``did you mean sync?``."""
    near = nearest(word, known)
    return otherwise if near is None else f"did you mean {near}?"


def cut(text: str) -> str:
    """Return a text, with the middle of a very long text replaced by the number of characters."""
    if len(text) <= FIRST + LAST:
        return text
    left_out = len(text) - FIRST - LAST
    return f"{text[:FIRST]}... ({left_out:,} characters are left out) ...{text[-LAST:]}"


def show_one_line_errors() -> bool:
    """Show an uncaught ``OneLineError`` of this program as one line from now on.

    Returns:
        Whether Python itself shows all other exceptions, without a hook of another library.
    """
    global _shown_before
    if _shown_before is None:
        _shown_before, sys.excepthook = sys.excepthook, _show
    return _is_plain(_shown_before) and sys.excepthook is _show


def _is_plain(hook: Hook) -> bool:
    """Return whether a hook shows exceptions as Python does: torch's hook only adds the rank."""
    module = getattr(hook, "__module__", None) or ""
    return hook is sys.__excepthook__ or module.startswith("torch.distributed")


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    assert _shown_before is not None
    if not isinstance(error, OneLineError) or not _is_plain(_shown_before):
        _shown_before(kind, error, trace)  # a custom hook shows all exceptions
    elif sys.stderr is not None:
        with suppress(OSError, ValueError):  # stderr is closed
            print(error.line, file=sys.stderr, flush=True)
    stays = sys.flags.inspect or sys.flags.interactive or hasattr(sys, "ps1")  # at the prompt
    if isinstance(error, OneLineError) and not stays:
        raise SystemExit(error.exit_code)
