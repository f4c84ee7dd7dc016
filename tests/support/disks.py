"""Disks that fill up or become read-only, and a user without some rights: for tests."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

NOBODY = 65534  # a user's number


@contextmanager
def disk(place: Path, size: str = "16m") -> Iterator[Path]:
    """Mount a separate file system at a new place; skip without the right to mount."""
    place.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(words, capture_output=True).returncode:
        pytest.skip("a file system of its own needs the right to mount")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def fill(place: Path, spare_bytes: int = 0) -> Path:
    """Fill a disk except for some bytes; return the filling file."""
    filler = place / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass
        file.truncate(file.tell() - spare_bytes)
    return filler


@contextmanager
def folder_of_nobody() -> Iterator[Path]:
    """Yield a folder of a user with fewer rights than root; the folder is removed afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="quorate-test-"))
    if os.geteuid() == 0:
        os.chown(folder, NOBODY, NOBODY)
    try:
        yield folder
    finally:
        subprocess.run(["chmod", "-R", "u+rwx", str(folder)], check=True)
        shutil.rmtree(folder)


@contextmanager
def as_nobody() -> Iterator[None]:
    """Make modes count within the block: root would ignore modes."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def tree(folder: Path) -> dict[str, bytes | str]:
    """Return the whole contents of a folder: contents of files, targets of links."""
    found: dict[str, bytes | str] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = os.readlink(path)  # noqa: PTH115
        elif path.is_file():
            found[name] = path.read_bytes()
        else:
            found[name] = "a folder" if path.is_dir() else "something else"
    return found
