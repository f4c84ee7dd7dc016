"""The status of a run: who goes on, who ended and how, and who was killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quorate.errors import SettingError
from quorate.services import run_status
from quorate.services.run_status import NAME, RunStatus, status_of


def status(run_dir: Path, last_step: int = 10) -> RunStatus:
    return RunStatus(run_dir, last_step, lambda: None)


def change(run_dir: Path, **changes: Any) -> None:
    record = json.loads((run_dir / NAME).read_text()) | changes
    (run_dir / NAME).write_text(json.dumps(record))


def state(run_dir: Path) -> tuple[str, int, str] | None:
    found = status_of(run_dir)
    return None if found is None else (found.state, found.global_step, found.reason)


def test_a_run_goes_on_until_it_ends(tmp_path: Path) -> None:
    writer = status(tmp_path)
    writer.begun(3)
    assert state(tmp_path) == ("running", 3, "")
    writer.ended(10, None, None)
    assert state(tmp_path) == ("finished", 10, "all steps are done")
    writer.ended(7, "max_time_s=60 has passed", None)
    assert state(tmp_path) == ("stopped", 7, "max_time_s=60 has passed")
    writer.ended(7, None, ValueError("labels\nfrom 0"))
    assert state(tmp_path) == ("failed", 7, "ValueError: labels\\nfrom 0")
    writer.ended(7, "SIGINT", KeyboardInterrupt())
    assert state(tmp_path) == ("stopped", 7, "SIGINT")


def test_a_run_whose_process_is_gone_was_killed(tmp_path: Path) -> None:
    code = (
        "import sys, os, pathlib; from quorate.services.run_status import RunStatus;"
        "RunStatus(pathlib.Path(sys.argv[1]), 9, lambda: None).begun(2); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    assert state(tmp_path) == ("killed", 2, "")
    # Another process has its number by now.
    change(tmp_path, pid=os.getpid())
    assert state(tmp_path) == ("killed", 2, "")


def test_a_run_of_another_host_cannot_be_looked_for(tmp_path: Path) -> None:
    status(tmp_path).begun(2)
    change(tmp_path, mark="another", host="node-\x1b[2J7")
    assert state(tmp_path) == ("elsewhere", 2, f"process {os.getpid()} on node-\\x1b[2J7")


@pytest.mark.parametrize(
    "changes",
    [
        {"state": "killed"},  # nobody writes that
        {"state": ["running"]},
        {"global_step": -1},
        {"global_step": 1.5},
        {"global_step": True},
        {"last_step": 1 << 60},
        {"at": "now"},
        {"at": -1},
        {"pid": "1", "state": "running"},
        {"pid": 1 << 70, "state": "running"},
        {"born": "x", "state": "running"},
    ],
)
def test_what_nobody_wrote_is_no_status(tmp_path: Path, changes: dict[str, Any]) -> None:
    status(tmp_path).begun(2)
    change(tmp_path, **changes)
    assert status_of(tmp_path) is None


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000, '{"state": "running"}'])
def test_a_torn_file_is_no_status(tmp_path: Path, text: str) -> None:
    (tmp_path / NAME).write_text(text)
    assert status_of(tmp_path) is None


def test_a_fifo_in_its_place_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / NAME)
    assert status_of(tmp_path) is None
    assert status_of(tmp_path / "nowhere") is None


def test_a_status_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    status(tmp_path / "gone").begun(1)
    RunStatus(None, 1, lambda: None).begun(1)

    def taken() -> None:
        raise SettingError("run_dir", "x", "one that no other run trains in", "wait")

    RunStatus(tmp_path, 1, taken).begun(1)
    assert list(tmp_path.iterdir()) == []
    assert run_status.KILLED not in run_status.WRITTEN
