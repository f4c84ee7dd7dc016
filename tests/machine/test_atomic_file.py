"""A file that is written atomically is there as a whole, or as it was before."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from stat import S_ISDIR

import pytest

from quorate.machine.atomic_file import write_atomically


def test_text_bytes_and_pieces_are_written_and_replace_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, "naïve\n")
    assert path.read_bytes() == "naïve\n".encode()
    write_atomically(path, b"\x00\xff")
    assert path.read_bytes() == b"\x00\xff"
    write_atomically(path, (bytes([n]) for n in range(3)))
    assert path.read_bytes() == b"\x00\x01\x02"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_the_mode_is_that_of_any_new_file(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        write_atomically(tmp_path / "file", b"")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o666 & ~mask


def test_data_that_raise_leave_the_file_of_before(tmp_path: Path) -> None:
    def broken() -> Iterator[bytes]:
        yield b"new"
        raise KeyboardInterrupt

    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, broken())
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_leaves_the_file_of_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "file"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"new")
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
