"""Exceptions of workers keep their types, texts, frames, notes and causes, whatever their source.

Their way to a run's user is in ``tests/end_to_end/test_scenarios.py``.
"""

import copy
import json
import pickle
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from support.trainings.faults import MineError

from quorate.engines.remote_error import from_json, to_json
from quorate.errors import (
    CutError,
    DataError,
    ExitError,
    LossError,
    OneLineError,
    SaveError,
    SettingError,
)


class SilentError(Exception):
    def __str__(self) -> str:
        return ""


def in_a_circle() -> Exception:
    one, two = ValueError("one"), ValueError("two")
    one.__context__, two.__context__ = two, one
    return one


# An exception, and the arriving exception if different.
ERRORS: list[tuple[BaseException, tuple[str, str] | None]] = [
    (RuntimeError("text"), None),
    (KeyError("a"), None),
    (KeyError(3), ("KeyError", "'3'")),
    (AssertionError(), None),
    (torch.OutOfMemoryError("full"), None),
    (LossError("no scalar"), None),
    (FileNotFoundError(2, "No such file", "rows.bin"), None),
    (in_a_circle(), None),
    (KeyboardInterrupt(), ("WorkerError", "builtins.KeyboardInterrupt")),
    (SystemExit(3), ("WorkerError", "builtins.SystemExit: 3")),
    (
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
        ("WorkerError", "builtins.UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff"),
    ),
    (MineError(1, 2), ("WorkerError", "MineError: 1 and 2")),
    (SilentError(), ("WorkerError", "SilentError")),
    (ExceptionGroup("several", [ValueError()]), ("WorkerError", "several (1 sub-exception)")),
]
# Exceptions of quorate, and parts of them.
PARTS: list[tuple[OneLineError, dict[str, Any]]] = [
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
    (
        SaveError("step 3 is not saved", 28, why="no room", fix="make room"),
        {"errno": 28, "why": "no room", "fix": "make room"},
    ),
]


def arrived(error: BaseException) -> BaseException:
    return from_json(json.loads(json.dumps(to_json(error), default=repr)))


@pytest.mark.parametrize(("error", "other"), [*ERRORS, *((error, None) for error, _ in PARTS)])
def test_types_and_texts_arrive(error: BaseException, other: tuple[str, str] | None) -> None:
    error.add_note("a note")
    found = arrived(error)
    kind, text = other or (type(error).__name__, str(error))
    assert type(found).__name__ == kind
    assert text in str(found)
    assert found.__notes__ == ["a note"]
    # The user's mistakes stay such, and other exceptions do not become such.
    assert getattr(found, "exit_code", 1) == getattr(error, "exit_code", 1)


@pytest.mark.parametrize(("error", "parts"), PARTS)
def test_the_parts_of_a_line_arrive_and_are_copied(
    error: OneLineError, parts: dict[str, Any]
) -> None:
    for found in (pickle.loads(pickle.dumps(error)), copy.copy(error), arrived(error)):
        assert (type(found), str(found)) == (type(error), str(error))
        for part, value in parts.items():
            kept = getattr(found, part)
            assert kept == value or str(kept) == value


@pytest.mark.parametrize("way", ["cause", "context", "neither"])
def test_frames_and_causes_are_shown_with_their_lines(way: str) -> None:
    def with_cause() -> None:
        try:
            raise KeyError("a key")
        except KeyError as cause:
            if way != "context":
                raise ValueError("a value") from (cause if way == "cause" else None)
            raise ValueError("a value")  # noqa: B904

    with pytest.raises(ValueError, match="a value") as raised:
        with_cause()
    found = arrived(raised.value)
    shown = "".join(traceback.format_exception(found))
    assert f'{Path(__file__).name}", line ' in shown
    assert 'in with_cause\n    raise ValueError("a value")' in shown
    assert ("KeyError: 'a key'" in shown) == (way != "neither")
    assert ("direct cause" in shown) == (way == "cause")
