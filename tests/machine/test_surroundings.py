"""Folders that a run needs around it, and descriptors 0 to 2."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from support.messages import expect_error

from quorate.errors import UserError
from quorate.machine.surroundings import require_current_folder, require_temporary_folder


def test_a_current_folder_that_was_deleted_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    try:
        with expect_error(UserError, name="the current folder", got="a deleted folder"):
            require_current_folder()
    finally:
        os.chdir(tmp_path)
    require_current_folder()


def test_no_place_for_temporary_files_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    with expect_error(UserError, name="the temporary folder"):
        require_temporary_folder()


def test_descriptors_that_are_closed_are_taken_before_files_get_them() -> None:
    check = (
        "import os\n"
        "from quorate.machine.standard_streams import occupy_standard_descriptors\n"
        "occupy_standard_descriptors()\n"
        "assert os.open('/dev/null', os.O_RDONLY) > 2\n"
        "assert all(os.get_inheritable(fd) for fd in (0, 1, 2))\n"
    )
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", check]
    assert subprocess.run(closed, timeout=60).returncode == 0


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_streams_that_a_process_does_not_have_are_flushed_and_written_to_by_doing_nothing(
    closed: str,
) -> None:
    check = (
        "import sys\n"
        "from quorate.machine.standard_streams import Steady, flush_standard_streams\n"
        "assert None in (sys.stdout, sys.stderr)\n"
        "flush_standard_streams()\n"
        "print('error', file=Steady(sys.stderr), flush=True)\n"  # None would be standard output
    )
    words = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", check]
    ended = subprocess.run(words, capture_output=True, timeout=60, check=False)
    expected = b"" if "2>&-" in closed else b"error\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", expected)
