"""Exceptions of workers keep types, texts, frames, notes and causes."""

from __future__ import annotations

import copy
import json
import pickle
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

from quorate.errors import (
    CutError,
    DataError,
    ExitError,
    LossError,
    OneLineError,
    SaveError,
    SettingError,
    UserError,
    WorkerError,
)
from quorate.transports import remote_error


class OwnError(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


class SilentError(Exception):
    def __str__(self) -> str:
        return ""


def across(error: BaseException) -> BaseException:
    return remote_error.from_json(json.loads(json.dumps(remote_error.to_json(error))))


def caught(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as found:
        return found


def test_an_exception_keeps_frames_notes_and_causes() -> None:
    def inner() -> None:
        unprintable: Any = object()
        try:
            raise KeyError("a key")
        except KeyError as error:
            raise ValueError(f"a value and {type(unprintable).__name__}") from error

    with pytest.raises(ValueError, match="a value") as info:
        inner()
    error = info.value
    error.add_note("a note")
    found = across(error)
    assert type(found) is ValueError
    assert found.args == error.args
    assert found.__notes__ == ["a note"]
    assert type(found.__cause__) is KeyError
    frames = [(f.filename, f.lineno, f.name) for f in traceback.extract_tb(found.__traceback__)]
    assert frames == [
        (f.filename, f.lineno, f.name) for f in traceback.extract_tb(error.__traceback__)
    ]
    shown = "".join(traceback.format_exception(found))
    assert "KeyError: 'a key'" in shown
    assert "direct cause" in shown
    assert 'raise ValueError(f"a value' in shown
    assert shown.endswith("a note\n")
    with pytest.raises(ValueError, match="a value"):
        raise found


def test_contexts_are_kept_unless_they_are_suppressed() -> None:
    try:
        try:
            raise KeyError("a key")
        except KeyError:
            raise ValueError("a value")  # noqa: B904
    except ValueError as error:
        found = across(error)
    assert type(found.__context__) is KeyError
    assert found.__cause__ is None
    try:
        try:
            raise KeyError("a key")
        except KeyError:
            raise ValueError("a value") from None
    except ValueError as error:
        found = across(error)
    assert found.__context__ is None


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (RuntimeError("text"), RuntimeError, "text"),
        (KeyError("a"), KeyError, "'a'"),
        (KeyError(3), KeyError, "3"),
        (StopIteration(5), StopIteration, "5"),
        (SystemExit(3), WorkerError, "SystemExit: 3"),
        (KeyboardInterrupt(), WorkerError, "KeyboardInterrupt"),
        (AssertionError(), AssertionError, ""),
        (torch.OutOfMemoryError("full"), torch.OutOfMemoryError, "full"),
        (LossError("no scalar"), LossError, "no scalar"),
        (
            SettingError("shards", 3, "more", "choose"),
            SettingError,
            "shards: got 3, expected more; choose",
        ),
        (
            FileNotFoundError(2, "No such file", "rows.bin"),
            Exception,
            "[Errno 2] No such file: 'rows.bin'",
        ),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), Exception, "can't decode byte 0xff"),
        (OwnError(1, 2), WorkerError, "OwnError: 1 and 2"),
        (SilentError(), WorkerError, "SilentError"),
        (json.JSONDecodeError("bad", "{", 1), WorkerError, "JSONDecodeError: bad"),
        (ExceptionGroup("several", [ValueError("one")]), Exception, "several (1 sub-exception)"),
    ],
)
def test_types_and_texts(error: BaseException, kind: type[BaseException], text: str) -> None:
    found = across(caught(error))
    assert isinstance(found, kind)
    assert text in str(found)
    # The user's mistakes stay such, and others do not become such.
    assert isinstance(found, UserError) == isinstance(error, UserError)
    assert "".join(traceback.format_exception(found))


def test_causes_in_a_circle_end() -> None:
    one, two = ValueError("one"), ValueError("two")
    one.__context__, two.__context__ = two, one
    assert str(across(one)) == "one"


ERRORS: list[tuple[OneLineError, dict[str, object]]] = [
    (
        SettingError("shards", 3, "more", "choose"),
        {"name": "shards", "got": 3, "expected": "more", "fix": "choose"},
    ),
    (SettingError("run_dir", object, "a path", "choose"), {"got": "<class 'object'>"}),
    (
        DataError(Path("a.bin"), got="no row", expected="one", offset=1024),
        {"where": "a.bin", "got": "no row", "expected": "one", "offset": 1024, "fix": ""},
    ),
    (CutError("it is odd", "cut elsewhere"), {"name": "split", "why": "it is odd"}),
    (ExitError("left", 7, fix="stay"), {"name": "left", "exit_code": 7, "fix": "stay"}),
]


@pytest.mark.parametrize(("error", "parts"), ERRORS, ids=[str(error) for error, _ in ERRORS])
def test_the_parts_of_a_line_arrive(error: OneLineError, parts: dict[str, object]) -> None:
    for found in (across(error), pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (type(found), str(found)) == (type(error), str(error))
        assert {name: getattr(found, name) for name in parts} == parts


def test_an_error_of_the_disk_keeps_its_number() -> None:
    error = SaveError("step 3 is not saved", 28, why="no room", fix="make room")
    error.add_note("a note")
    for found in (across(error), pickle.loads(pickle.dumps(error))):
        assert isinstance(found, SaveError)
        assert str(found) == "step 3 is not saved: no room; make room"
        assert (found.errno, found.fix, found.__notes__) == (28, "make room", ["a note"])
