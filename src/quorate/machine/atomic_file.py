"""Files that are written as a whole or not at all, whatever ends the program or the machine."""

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
    """Write a file, or replace it. Blocks until it is on the disk.

    It is written beside its place, flushed, and moved there. Whoever reads meanwhile, or after a
    power cut, finds the file of before or the new one. Only a kill leaves anything else: a file
    ``.quorate-*`` in the folder.

    Args:
        path: In a folder that exists.
        like: of a file whose mode and owner the new one gets, the owner if that may be; else its
            mode is what the umask leaves of 0666.
        data: Text is written in UTF-8.

    Raises:
        OSError: it cannot be written. Then, and when ``data`` raises, the file of before stays.
    """
    if isinstance(data, str):
        data = data.encode()
    pieces = (data,) if isinstance(data, bytes) else data
    fresh = path.with_name(f".quorate-{secrets.token_hex(8)}")  # tempfile's would be 0600
    try:
        with fresh.open("xb") as file:
            if like is not None:
                _become(file.fileno(), like)
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())  # before the name: else it may come to name an empty file
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
    """Make an empty folder, to be renamed to what it is to be, and return it.

    Its mode is what the umask leaves of 0777: one of ``tempfile`` would be the user's alone, and
    would stay so under its new name.

    Raises:
        OSError: it cannot be made.
    """
    path = parent / f"{prefix}{secrets.token_hex(8)}"
    path.mkdir()
    return path


def flush_folder(path: Path) -> None:
    """Bring the names in a folder to the disk: a rename alone may not outlast a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
