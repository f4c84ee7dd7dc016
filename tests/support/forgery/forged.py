"""A checkpoint in memory, changed and written with sound checksums; and odd values."""

import hashlib
import json
import math
import os
import random
import socket
from collections.abc import Callable, Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

Json = Any
# The format, as in docs/checkpoints.md.
RECORD, MARKER, RECORD_SHA256 = "state.json", "complete", "record_sha256"
TENSORS = ("model.safetensors", "averaged.safetensors", "optimizer.safetensors")
ODD: tuple[Json, ...] = (
    *(None, True, False, 0, -1, 1.5, 6.0, 10**30, -(10**400), math.nan, math.inf, -math.inf),
    *("", "6", "a text", "\x1b[2J\x07", "\u202e", "\ud800", [], [[]], {}, {"": None}, [None, {}]),
)


class Forged:
    """A checkpoint in memory, to be changed and written with sound checksums."""

    def __init__(self, path: Path, chance: random.Random) -> None:
        self.path = path
        self.chance = chance
        self.record: dict[str, Json] = json.loads((path / RECORD).read_bytes())
        self.headers: dict[str, dict[str, Json]] = {}
        self.data: dict[str, bytes] = {}
        for name in TENSORS:
            content = (path / name).read_bytes()
            length = int.from_bytes(content[:8], "little")
            self.headers[name] = json.loads(content[8 : 8 + length])
            self.data[name] = content[8 + length :]
        self.sums: dict[str, str] = dict(self.record["files"])
        self.keeps_link: set[str] = set()  # files with an unchanged tie to the record
        self.texts: dict[str, bytes] = {}  # of headers, in the place of those above
        self.raw: dict[str, bytes] = {}  # whole files
        self.text: Callable[[bytes], bytes] = lambda text: text  # of state.json

    def inside(self, trail: tuple[Json, ...]) -> Json:
        """Return the container of the place at the end of a trail of keys."""
        found: Json = self.record
        for key in trail[:-1]:
            found = found[key]
        return found

    def tensor(self, file: str) -> str:
        """Return the name of a tensor in a file."""
        return self.chance.choice([name for name in self.headers[file] if name != "__metadata__"])

    def repack(self, file: str, shapes: dict[str, tuple[str, list[int], bytes]]) -> None:
        """Let a file hold these: dtype, shape and bytes by name."""
        header, data = {"__metadata__": self.headers[file]["__metadata__"]}, b""
        for name, (dtype, shape, content) in shapes.items():
            offsets = [len(data), len(data) + len(content)]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
            data += content
        self.headers[file], self.data[file] = header, data

    def unpack(self, file: str) -> dict[str, tuple[str, list[int], bytes]]:
        """Return the contents of a file."""
        return {
            name: (entry["dtype"], entry["shape"], self.data[file][slice(*entry["data_offsets"])])
            for name, entry in self.headers[file].items()
            if name != "__metadata__"
        }

    def write(self) -> None:
        """Write the checkpoint, with all checksums."""
        body = {name: value for name, value in self.record.items() if name != "files"}
        link = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        for name in TENSORS:
            header = self.headers[name]
            metadata = header.get("__metadata__")
            if name not in self.keeps_link and isinstance(metadata, dict):
                metadata[RECORD_SHA256] = link
            text = self.texts.get(name) or json.dumps(header).encode()
            length = len(text).to_bytes(8, "little")
            content = self.raw.get(name, length + text + self.data[name])
            (self.path / name).write_bytes(content)
            sums = self.record.get("files")
            if isinstance(sums, dict) and sums.get(name) == self.sums[name]:  # and not forged
                sums[name] = hashlib.sha256(content).hexdigest()
        self.seal(self.text(json.dumps(self.record, indent=1).encode() + b"\n"))

    def seal(self, text: bytes) -> None:
        """Write a record, and the matching marker."""
        (self.path / RECORD).write_bytes(text)
        (self.path / MARKER).write_text(hashlib.sha256(text).hexdigest() + "\n")


def places_in(value: Json, trail: tuple[Json, ...] = ()) -> Iterator[tuple[Json, ...]]:
    """Yield the keys and indices that lead to every value at every level."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*trail, key)
        is_free = not trail and key == "hyperparameters"  # of any optimizer: anything
        if isinstance(inner, (dict, list)) and not is_free:
            yield from places_in(inner, (*trail, key))


# --- a substitute for a file: blocking, endless, or no file ---------------------------------------


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as end, chdir(path.parent):  # of an address: 107 bytes
        end.bind(path.name)


def _link_to_a_fifo(path: Path) -> None:
    os.mkfifo(path.with_name("pipe"))
    path.symlink_to(path.with_name("pipe"))


def _sparse(path: Path) -> None:
    path.write_bytes(b"")
    os.truncate(path, 1 << 40)


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
    "a link to /proc/self/mem": lambda path: path.symlink_to("/proc/self/mem"),
    "a socket": _socket,
    "unreadable": lambda path: path.touch(0),
    "empty": Path.touch,
}


def in_place_of(path: Path, chance: random.Random) -> str:
    """Put a substitute in the place of a file, and return its description."""
    path.unlink()
    name = chance.choice([*MORE_PLACES])
    MORE_PLACES[name](path)
    return f"{path.name} is {name}"
