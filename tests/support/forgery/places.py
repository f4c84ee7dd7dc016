"""Something else in the place of a file: what blocks, has no end, or is none."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as end, chdir(path.parent):  # of an address: 107 bytes
        end.bind(path.name)


def _link_to_a_fifo(path: Path) -> None:
    os.mkfifo(path.with_name("pipe"))
    path.symlink_to(path.with_name("pipe"))


def _sparse(path: Path) -> None:
    path.write_bytes(b"")
    os.truncate(path, 1 << 40)


def _link_to_a_link(path: Path) -> None:
    path.symlink_to(path.with_name("there"))
    path.with_name("there").symlink_to(path)


PLACES: dict[str, Callable[[Path], object]] = {
    "a FIFO": os.mkfifo,
    "a directory": Path.mkdir,
    "a link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "a link to a FIFO": _link_to_a_fifo,
    "a dangling link": lambda path: path.symlink_to(path.with_name("nothing")),
    "a link to itself": lambda path: path.symlink_to(path),
    "missing": lambda path: None,
    "a sparse terabyte": _sparse,
}
MORE_PLACES = PLACES | {
    "a link to a link to itself": _link_to_a_link,
    "a link to /proc/self/mem": lambda path: path.symlink_to("/proc/self/mem"),
    "a socket": _socket,
    "unreadable": lambda path: path.touch(0),
    "empty": Path.touch,
}


def in_place_of(path: Path, chance: random.Random) -> str:
    """Put something else in the place of a file, and return what."""
    path.unlink()
    name = chance.choice([*MORE_PLACES])
    MORE_PLACES[name](path)
    return f"{path.name} is {name}"
