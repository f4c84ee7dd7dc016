"""Exceptions across processes: an exception of a worker's user code is raised in the coordinator.

An exception is sent as plain values instead of a pickle, with traceback, notes and causes. Types of
Python, torch and quorate stay the same type, and errors of quorate keep their parts (name, got,
expected, fix). Exceptions of all further types arrive as a ``WorkerError`` with the name of the
type, because a foreign constructor may do anything. Long texts are cut: messages are small.
"""

from __future__ import annotations

import builtins
import traceback
from types import TracebackType
from typing import Any

import torch
from tblib import Traceback  # type: ignore[import-untyped]

from quorate import errors
from quorate.errors import ExitError, OneLineError, cut

ErrorFields = dict[str, Any]
_Frame = tuple[str, str, int]  # file, function, line

MOST_FRAMES = 60  # of a traceback; an endless recursion has a thousand
MOST_CAUSES = 10
MOST_NOTES = 20


def to_json(error: BaseException, depth: int = 0) -> ErrorFields:
    """Return an exception as the argument of ``from_json``, up to a depth of causes."""
    kind = type(error)
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    notes = getattr(error, "__notes__", ())
    os_error = None
    is_plain = not isinstance(error, OneLineError)
    if is_plain and isinstance(error, OSError) and error.errno is not None:
        os_error = [error.errno, error.strerror, _name(error.filename)]
    return {
        "type": kind.__qualname__,
        "module": kind.__module__,
        "text": _text(error),
        "argument": cut(error.args[0]) if error.args and isinstance(error.args[0], str) else None,
        "parts": error.parts if isinstance(error, OneLineError) else {},
        "os_error": os_error,
        "notes": [cut(str(note)) for note in notes[:MOST_NOTES]],
        "frames": _frames(error),
        "cause": None if cause is None or depth == MOST_CAUSES else to_json(cause, depth + 1),
        "is_cause": error.__cause__ is not None,
    }


def from_json(raised: ErrorFields) -> BaseException:
    """Return an exception to raise, with a traceback that begins with the worker's frames."""
    error = _rebuilt(raised).with_traceback(_traceback(raised["frames"]))
    for note in raised["notes"]:
        error.add_note(note)
    if raised["cause"] is not None:
        cause = from_json(raised["cause"])
        if raised["is_cause"]:
            error.__cause__ = cause
        else:
            error.__context__ = cause
    return error


def _rebuilt(raised: ErrorFields) -> BaseException:
    home = {"builtins": builtins, "torch": torch, "quorate.errors": errors}.get(raised["module"])
    kind: object = getattr(home, raised["type"], None)
    text = raised["text"] if raised["argument"] is None else raised["argument"]
    # A SystemExit, for example, would end the coordinator without a message.
    if isinstance(kind, type) and issubclass(kind, Exception):
        if raised["os_error"] is not None:
            number, meaning, name = raised["os_error"]
            return OSError(number, meaning, name)  # an object of the subclass for the number
        if kind.__str__ in (BaseException.__str__, KeyError.__str__, OSError.__str__):
            try:
                error = kind.__new__(kind, text)
            except TypeError:  # the type has more arguments: an ExceptionGroup, for example
                pass
            else:
                error.args = (text,)
                for part, value in raised["parts"].items():
                    setattr(error, part, value)
                return error
    name = f"{raised['module']}.{raised['type']}".removeprefix("__main__.")
    return errors.WorkerError(f"{name}: {raised['text']}" if raised["text"] else name)


def _text(error: BaseException) -> str:
    if isinstance(error, BaseExceptionGroup):
        return cut("\n".join(traceback.format_exception(error)).rstrip())
    try:
        return cut(str(error))
    except Exception as unprintable:  # user code
        return f"<its __str__ raised {type(unprintable).__name__}>"


def _name(file: object) -> str | None:
    return None if file is None else cut(str(file))


def _frames(error: BaseException) -> list[_Frame]:
    frames = [
        (frame.f_code.co_filename, frame.f_code.co_name, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    half = MOST_FRAMES // 2
    return frames if len(frames) <= MOST_FRAMES else [*frames[:half], *frames[-half:]]


def _traceback(frames: list[_Frame]) -> TracebackType | None:
    inner: dict[str, Any] | None = None
    for file, function, line in reversed(frames):
        frame = {
            "f_globals": {"__file__": file, "__name__": ""},
            "f_code": {"co_filename": file, "co_name": function},
            "f_lineno": line,
        }
        inner = {"tb_frame": frame, "tb_lineno": line, "tb_next": inner}
    if inner is None:
        return None
    rebuilt: TracebackType = Traceback.from_dict(inner).as_traceback()
    return rebuilt


def exited(error: SystemExit, where: str) -> ExitError:
    """Return the error for a ``sys.exit()`` of user code in a shard.

    Args:
        where: worker and shard, in words.
    """
    code = error.code if isinstance(error.code, int) and error.code % 256 else 1
    given = "" if error.code is None else cut(repr(error.code))
    return ExitError(
        f"sys.exit({given}) was called by the code that computes a shard, in {where}",
        code,
        fix="raise an exception there, or call stop() of the trainer in a callback",
    )
