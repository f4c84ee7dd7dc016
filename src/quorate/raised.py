"""Exceptions across processes: what a worker's user code raised, raised again in the coordinator.

An exception travels as JSON and not as a pickle. It keeps its traceback, notes and causes. Built-in
types, torch's and quorate's own come back as themselves; any other as a ``WorkerError`` that names
it: its constructor may do anything.
"""

from __future__ import annotations

import builtins
from typing import Any

import torch
from tblib import Traceback  # type: ignore[import-untyped]

from quorate import errors

Raised = dict[str, Any]


def to_json(error: BaseException) -> Raised:
    """What ``from_json`` needs."""
    kind = type(error)
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return {
        "type": kind.__qualname__,
        "module": kind.__module__,
        "text": str(error),
        "argument": error.args[0] if error.args and isinstance(error.args[0], str) else None,
        "notes": list(getattr(error, "__notes__", ())),
        "traceback": None if error.__traceback__ is None else _frames(error.__traceback__),
        "cause": None if cause is None else to_json(cause),
        "is_cause": error.__cause__ is not None,
    }


def from_json(raised: Raised) -> BaseException:
    """An exception to raise; its traceback begins with the worker's frames."""
    error = _made(raised)
    for note in raised["notes"]:
        error.add_note(note)
    if raised["traceback"] is not None:
        error = error.with_traceback(Traceback.from_dict(raised["traceback"]).as_traceback())
    if raised["cause"] is not None:
        cause = from_json(raised["cause"])
        if raised["is_cause"]:
            error.__cause__ = cause
        else:
            error.__context__ = cause
    return error


def _made(raised: Raised) -> BaseException:
    home = {"builtins": builtins, "torch": torch, "quorate.errors": errors}.get(raised["module"])
    kind: object = getattr(home, raised["type"], None)
    text = raised["text"] if raised["argument"] is None else raised["argument"]
    if isinstance(kind, type) and issubclass(kind, BaseException):
        error = kind.__new__(kind, text)
        error.args = (text,)
        if kind.__str__ in (BaseException.__str__, KeyError.__str__):
            return error  # else it prints attributes that only its constructor sets
    name = f"{raised['module']}.{raised['type']}".removeprefix("__main__.")
    return errors.WorkerError(f"{name}: {raised['text']}" if raised["text"] else name)


def _frames(traceback: Any) -> dict[str, Any]:
    """The traceback in JSON, without the variables of its frames."""
    found: dict[str, Any] = Traceback(traceback).as_dict()
    frame: dict[str, Any] | None = found
    while frame is not None:
        # What a frame's globals are is told by two names, and more may not be JSON.
        names = frame["tb_frame"]["f_globals"]
        frame["tb_frame"]["f_globals"] = {
            key: value for key, value in names.items() if isinstance(value, str)
        }
        frame["tb_frame"]["f_locals"] = {}
        frame = frame["tb_next"]
    return found
