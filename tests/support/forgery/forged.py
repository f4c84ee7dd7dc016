"""A checkpoint in memory, which is changed and written with sound checksums."""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quorate.services.checkpoints.files import MARKER, RECORD, RECORD_SHA256
from quorate.services.checkpoints.record import body_sha256

Json = Any
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
        self.keeps_link: set[str] = set()  # files whose tie to the record is left as it is
        self.texts: dict[str, bytes] = {}  # of headers, in the place of those above
        self.raw: dict[str, bytes] = {}  # whole files
        self.text: Callable[[bytes], bytes] = lambda text: text  # of state.json
        self.length: Callable[[int], int] = lambda length: length  # of a header

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
        """Return what a file holds."""
        return {
            name: (entry["dtype"], entry["shape"], self.data[file][slice(*entry["data_offsets"])])
            for name, entry in self.headers[file].items()
            if name != "__metadata__"
        }

    def write(self) -> None:
        """Write it, with all checksums."""
        link = body_sha256(self.record)
        for name in TENSORS:
            header = self.headers[name]
            metadata = header.get("__metadata__")
            if name not in self.keeps_link and isinstance(metadata, dict):
                metadata[RECORD_SHA256] = link
            text = self.texts.get(name) or json.dumps(header).encode()
            length = self.length(len(text)).to_bytes(8, "little")
            content = self.raw.get(name, length + text + self.data[name])
            (self.path / name).write_bytes(content)
            sums = self.record.get("files")
            if isinstance(sums, dict) and sums.get(name) == self.sums[name]:  # and not forged
                sums[name] = hashlib.sha256(content).hexdigest()
        self.seal(self.text(json.dumps(self.record, indent=1).encode() + b"\n"))

    def seal(self, text: bytes) -> None:
        """Write a record, and the marker that fits it."""
        (self.path / RECORD).write_bytes(text)
        (self.path / MARKER).write_text(hashlib.sha256(text).hexdigest() + "\n")
