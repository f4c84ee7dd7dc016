"""Files written completely or not at all, even if the program or the machine is killed."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def write_atomically(
    path: Path, data: str | bytes | Iterable[bytes], *, like: os.stat_result | None = None
) -> None:
    """Write a file, or replace it. Blocks until the file is on disk.

    The data are written to a temporary file in the same folder, flushed, and renamed. A reader
    finds the old or the new file, even after a power cut. A kill may leave a temporary file
    ``.quorate-*`` in the folder.

    Args:
        path: path in an existing folder.
        like: status of a file whose mode, and owner if permitted, the new file gets. Default: the
            mode is 0666 minus the umask.
        data: the content. Text is written in UTF-8.

    Raises:
        OSError: the file cannot be written. Then, and when ``data`` raises, the old file is
            unchanged.
    """
    if isinstance(data, str):
        data = data.encode()
    pieces = (data,) if isinstance(data, bytes) else data
    fresh = path.with_name(f".quorate-{secrets.token_hex(8)}")  # tempfile's mode would be 0600
    try:
        with fresh.open("xb") as file:
            if like is not None:
                _become(file.fileno(), like)
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())  # before the rename: else a power cut may leave an empty file
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    flush_folder(path.parent)


def _become(descriptor: int, like: os.stat_result) -> None:
    with suppress(PermissionError):
        os.fchown(descriptor, like.st_uid, like.st_gid)
    os.fchmod(descriptor, stat.S_IMODE(like.st_mode))


def folder_beside(parent: Path, prefix: str) -> Path:
    """Make an empty folder under a temporary name, to be renamed later, and return its path.

    The mode is 0777 minus the umask: a folder of ``tempfile`` would be private, and would stay
    private under its final name.

    Raises:
        OSError: the folder cannot be made.
    """
    path = parent / f"{prefix}{secrets.token_hex(8)}"
    path.mkdir()
    return path


def flush_folder(path: Path) -> None:
    """Flush the names in a folder to disk: a rename alone may not survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
