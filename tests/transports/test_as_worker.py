"""A script as a worker runs it: its input, the files that the script's own process is writing."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.messages import expect_error

import quorate
from quorate.errors import InputError, UserError, WorkerError
from quorate.transports.as_worker import own_process, written_files
from quorate.transports.as_worker.no_input import take_away_input
from quorate.transports.as_worker.raised import message_of, raised_in


@pytest.fixture
def no_input() -> Iterator[None]:
    before = sys.stdin
    try:
        take_away_input()
        yield
    finally:
        sys.stdin = before


@pytest.mark.usefixtures("no_input")
@pytest.mark.parametrize(
    "read",
    [
        lambda: input("name? "),
        lambda: sys.stdin.read(),
        lambda: sys.stdin.readline(),
        lambda: sys.stdin.readlines(),
        lambda: list(sys.stdin),
        lambda: sys.stdin.buffer.read(),
    ],
)
def test_who_reads_the_input_of_a_worker_is_told(read: Callable[[], object]) -> None:
    line = read.__code__.co_firstlineno
    with expect_error(InputError, name="stdin") as caught:
        read()
    assert caught.value.why.startswith(f"test_as_worker.py:{line} ")
    with pytest.raises(EOFError):  # a script that is content with no input stays so
        read()


@pytest.mark.usefixtures("no_input")
def test_the_input_of_a_worker_is_no_terminal_and_can_be_asked_about() -> None:
    assert not sys.stdin.isatty()
    assert not sys.stdin.closed
    assert sys.stdin.fileno() == 0
    assert sys.stdin.readable()


@pytest.mark.skipif(not Path("/proc/self/fdinfo").exists(), reason="files are found in /proc")
def test_files_that_are_open_for_writing(tmp_path: Path) -> None:
    written, read, closed = (tmp_path / name for name in ("written", "read", "closed"))
    for path in (written, read, closed):
        path.write_text("x")
    removed = (tmp_path / "removed").open("w")
    (tmp_path / "removed").unlink()
    with written.open("a"), read.open(), removed:
        writes = own_process.facts()["writes"]
    (tmp_path / "link").symlink_to(written)
    assert own_process.identity((tmp_path / "link").stat()) in writes
    assert own_process.identity(read.stat()) not in writes
    assert own_process.identity(closed.stat()) not in writes


OPENED = {
    "w": (lambda path: path.open("w"), "empties the file"),
    "a": (lambda path: path.open("a"), "writes to the file"),
    "r+b": (lambda path: path.open("r+b"), "writes to the file"),
    "os.open": (lambda path: os.fdopen(os.open(path, os.O_RDWR)), "writes to the file"),
    "logging": (lambda path: logging.FileHandler(path, "w"), "empties the file"),
}


@pytest.mark.parametrize("way", OPENED)
def test_a_file_that_is_being_written_and_opened_once_more(way: str, tmp_path: Path) -> None:
    path, other = tmp_path / "train.log", tmp_path / "other.log"
    path.write_text("x")
    other.write_text("x")
    opened, what = OPENED[way]
    written_files.look_out({own_process.identity(path.stat())})
    opened(path).close()
    opened(path).close()
    opened(other).close()
    path.read_text()
    line = opened.__code__.co_firstlineno
    (found,) = written_files.found()
    assert found.startswith(f"{path}: each worker process {what} (test_as_worker.py:{line})")
    opened(path).close()  # after the script's part
    assert written_files.found() == []


def test_an_exception_of_the_script_says_where_in_the_script() -> None:
    try:
        int("four")  # line of the script
    except ValueError as error:
        line = error.__traceback__.tb_lineno
        raised = raised_in(1, message_of(error))
    said = "invalid literal for int() with base 10: 'four'"
    assert raised.text == f"ValueError: {said} (test_as_worker.py:{line})"
    assert isinstance(raised.error, ValueError)
    assert "worker 1 raised it" in raised.error.__notes__[0]


def test_an_exception_of_a_type_of_the_script_is_named() -> None:
    class Broken(Exception):  # noqa: N818
        pass

    try:
        raise Broken("twice")
    except Broken as error:
        raised = raised_in(0, message_of(error))
    assert isinstance(raised.error, WorkerError)
    assert ".Broken: twice (test_as_worker.py:" in raised.text


def test_the_role_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert quorate.is_worker() is False
    for rank, is_worker in (("0", False), ("3", True)):
        monkeypatch.setenv("RANK", rank)
        assert quorate.is_worker() is is_worker


def test_the_error_is_a_mistake_and_an_end_of_file() -> None:
    assert issubclass(InputError, UserError)
    assert issubclass(InputError, EOFError)
