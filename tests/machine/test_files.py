"""Files written whole or not at all, shared memory without a name, text for terminals."""

import os
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from stat import S_ISDIR

import pytest
import torch
from support.messages import expect_error

from quorate.errors import UserError
from quorate.machine import shared_memory
from quorate.machine.atomic_file import write_atomically
from quorate.machine.shared_memory import Segment
from quorate.machine.text import printable

# --- files whole or as before ---------------------------------------------------------------------


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_text_bytes_and_pieces_are_written_with_the_mode_of_any_new_file(
    tmp_path: Path, mask: int
) -> None:
    path = tmp_path / "file"
    before = os.umask(mask)
    try:
        for data, content in (
            ("naïve\n", "naïve\n".encode()),
            (b"\x00\xff", b"\x00\xff"),
            ((bytes([n]) for n in range(3)), b"\x00\x01\x02"),
        ):
            write_atomically(path, data)
            assert path.read_bytes() == content
    finally:
        os.umask(before)
    assert list(tmp_path.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask


def broken() -> Iterator[bytes]:
    yield b"new"
    raise KeyboardInterrupt


def full(descriptor: int) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("is_full", [False, True])
def test_data_that_raise_or_a_full_disk_leave_the_file_of_before(
    is_full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    if is_full:
        monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError if is_full else KeyboardInterrupt):
        write_atomically(path, b"new" if is_full else broken())
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_it_is_flushed_before_it_gets_its_name_and_its_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    flushed: list[tuple[str, bool]] = []

    def flush(descriptor: int) -> None:
        is_folder = S_ISDIR(os.fstat(descriptor).st_mode)
        flushed.append(("folder" if is_folder else "file", path.exists()))

    monkeypatch.setattr(os, "fsync", flush)
    write_atomically(path, b"data")
    assert flushed == [("file", False), ("folder", True)]


# --- shared memory --------------------------------------------------------------------------------


def test_a_segment_is_the_users_alone_and_has_no_name() -> None:
    before = set(Path("/dev/shm").iterdir())
    segment = Segment(1 << 16)
    status = os.fstat(segment.fd)
    assert (status.st_mode & 0o777, status.st_size, status.st_nlink) == (0o600, 1 << 16, 0)
    assert set(Path("/dev/shm").iterdir()) == before
    assert not os.get_inheritable(segment.fd)
    assert not any(segment.map[:])
    other = Segment(1 << 16, os.dup(segment.fd))
    segment.tensor(torch.float32, 3, 64).fill_(1.5)
    assert other.tensor(torch.float32, 3, 64).tolist() == [1.5] * 3
    assert other.tensor(torch.float32, 0, 0).shape == (0,)


def test_more_than_there_can_be_and_more_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with expect_error(UserError, name="shared memory", hide=r"(?<=\()[^)]*"):
        Segment(1 << 62)
    free = shared_memory.free_bytes()
    assert free is None or 1 << 20 < free < 1 << 50
    monkeypatch.setattr(shared_memory, "free_bytes", lambda: 5 << 20)
    shared_memory.require(5 << 20, "rows", "use less")
    with expect_error(UserError, name="shared memory"):
        shared_memory.require(6 << 20, "rows", "use less")


@pytest.mark.skipif(sys.platform != "linux", reason="only there")
def test_one_becomes_another_and_tensors_stay_where_they_are() -> None:
    own, other = Segment(3 << 20), Segment(3 << 20)
    tensor, theirs = (each.tensor(torch.float32, 1000, 64) for each in (own, other))
    tensor.fill_(1.0)
    theirs.fill_(2.0)
    address, inode = tensor.data_ptr(), os.fstat(other.fd).st_ino
    before = os.dup(own.fd)
    own.become(other)
    assert tensor.data_ptr() == address
    assert os.fstat(before).st_size == 0  # the old memory was given back
    os.close(before)
    assert tensor.eq(2.0).all()
    tensor.fill_(3.0)
    assert theirs.eq(3.0).all()
    assert os.fstat(own.fd).st_ino == inode


# --- text of an unknown origin --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        *((text, text) for text in ("", "a b", "naïve", "模型 已保存", "Ω≈ç√", "C:\\runs\\x1b")),
        ("\x1b[2J\x1b]0;mine\x07", "\\x1b[2J\\x1b]0;mine\\x07"),
        ("one\ntwo\r\x00\x7f\x9b", "one\\ntwo\\r\\x00\\x7f\\x9b"),
        ("\u202eabc\u2028\ud800", "\\u202eabc\\u2028\\ud800"),
    ],
)
def test_what_a_terminal_would_obey_is_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_of_all_characters_none_is_obeyed_and_all_can_be_written() -> None:
    for start in range(0, sys.maxunicode + 1, 4096):
        text = "".join(map(chr, range(start, min(start + 4096, sys.maxunicode + 1))))
        shown = printable(text, 4096)
        shown.encode()
        kinds = {unicodedata.category(character) for character in shown}
        assert not kinds & {"Cc", "Cf", "Cs", "Zl", "Zp"}


def test_long_text_is_cut_in_the_middle_and_says_how_much_is_missing() -> None:
    shown = printable("a" * 50_000_000 + "end", 30)
    assert shown == "a" * 20 + "... 49,999,973 characters ..." + "a" * 7 + "end"
    assert len(printable("\x00" * 1_000_000)) < 2000
