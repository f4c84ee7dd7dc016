"""Descriptors of another process of this user, opened under /proc.

Memory and pipes shared in this way have no name: a kill leaves no name behind, and processes of
further users cannot open them.
"""

from __future__ import annotations

import os
from pathlib import Path

Offer = list[int]  # process, descriptor, device and inode of a file: plain numbers, for messages


def offer(fd: int) -> Offer:
    """Return the description of a descriptor, for ``opened`` in another process."""
    file = os.fstat(fd)
    return [os.getpid(), fd, file.st_dev, file.st_ino]


def opened(offered: Offer, flags: int) -> int | None:
    """Open the file of another process's descriptor; return None on failure.

    Processes of another container or another user cannot be opened.
    """
    pid, fd, *identity = offered
    path = Path(f"/proc/{pid}/fd/{fd}")
    try:
        # Compare before opening: to open and close a foreign pipe would end the pipe for others.
        file = path.stat()
        if [file.st_dev, file.st_ino] == identity:
            return os.open(path, flags | os.O_CLOEXEC)
    except OSError:
        pass
    return None
