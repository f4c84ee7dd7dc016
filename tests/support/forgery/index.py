"""Forged indexes of tar, text and TFRecord files: right checksums over what cannot be.

forgery   array | table | top | file
array     a value at any place that is negative, huge, or of another row; an element too many,
          one too few, none
table     of the arrays' dtypes, places and sizes: odd ones, others, no JSON, deep, twice
top       other sizes of header and body, cut, something behind it, another magic
file      something else in its place, see ``in_place_of``
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
from support.forgery.forged import ODD
from support.forgery.places import in_place_of

TOP = struct.Struct("<16sqqqI")  # of both formats: magic, size, time, a length, CRC-32C
WRONG = (-1, -(2**63), 2**63 - 1, 2**62, 2**40, 0, 1, 7, 511, 512, 10_000)
DTYPES = ("<f8", "<i4", ">i8", "|O", "|V8", "<U4", "<M8[ns]", "<c16", "nothing", "", None, 7, [])


class ForgedIndex:
    """An index in memory, to be changed and written with a sound checksum.

    Args:
        path: of a sound index.
        chance: draws what is forged.
    """

    def __init__(self, path: Path, chance: random.Random) -> None:
        self.path, self.chance = path, chance
        content = path.read_bytes()
        self.magic, self.size, self.changed_ns, self.number, _ = TOP.unpack_from(content)
        self.is_records = self.magic.startswith(b"quorate-index")
        rest = content[TOP.size :]
        if self.is_records:
            self.table: Any = {"offsets": ["<i8", TOP.size, len(rest)]}
        else:
            self.table = json.loads(rest[: self.number])
        self.arrays = {
            name: np.frombuffer(content[at : at + nbytes], dtype=dtype)
            for name, (dtype, at, nbytes) in self.table.items()
        }

    def packed(
        self, text: Callable[[Any], bytes] = lambda table: json.dumps(table).encode()
    ) -> bytes:
        """Return the content of an index of these arrays.

        Args:
            text: makes the table of arrays from what it should be.
        """
        if self.is_records:
            body = self.arrays["offsets"].tobytes()
            return self.sealed(len(self.arrays["offsets"]) - 1, body)
        head = b""
        for _ in range(4):  # where arrays begin depends on how long the table is
            at, table = TOP.size + len(head), {}
            for name, array in self.arrays.items():
                at += -at % 64
                table[name] = [array.dtype.str, at, array.nbytes]
                at += array.nbytes
            head = text(table)
        body = bytearray(head)
        for (_, start, _), array in zip(table.values(), self.arrays.values(), strict=True):
            body += bytes(max(0, start - TOP.size - len(body))) + array.tobytes()
        return self.sealed(len(head), bytes(body))

    def sealed(self, number: int, body: bytes) -> bytes:
        """Return a body below a top with its checksum."""
        crc = google_crc32c.value(body)
        return TOP.pack(self.magic, self.size, self.changed_ns, number, crc) + body


def _array(forged: ForgedIndex) -> str:
    chance = forged.chance
    name = chance.choice([*forged.arrays])
    array = forged.arrays[name].copy()
    way = chance.choice(
        ["a value", "a value", "all values", "one less", "one more", "none", "back"]
    )
    wrong = chance.choice((*WRONG, forged.size, forged.size + 1))
    if array.dtype.itemsize < 8:
        wrong %= 256 if array.dtype.itemsize == 1 else 1 << 31
    if way == "a value" and len(array):
        array[chance.randrange(len(array))] = wrong
    elif way == "all values":
        array[:] = wrong
    elif way == "one less":
        array = array[:-1]
    elif way == "one more":
        array = np.append(array, np.array([wrong], array.dtype))
    elif way == "back":
        array = array[::-1].copy()
    else:
        array = array[:0]
    forged.arrays[name] = array
    forged.path.write_bytes(forged.packed())
    return f"{name}: {way} ({wrong})"


def _table(forged: ForgedIndex) -> str:
    if forged.is_records:
        return _top(forged)
    chance = forged.chance
    name = chance.choice([*forged.arrays])
    place = chance.randrange(3)
    odd = chance.choice(DTYPES if place == 0 else (*ODD, *WRONG, 10**400))

    def entry(table: dict[str, Any]) -> bytes:
        table = table | {name: [odd if n == place else v for n, v in enumerate(table[name])]}
        return json.dumps(table).encode()

    ways: dict[str, Callable[[dict[str, Any]], bytes]] = {
        f"entry {place} is {odd!r:.40}": entry,
        "an entry is odd": lambda table: json.dumps(table | {name: odd}).encode(),
        "an array is missing": lambda table: json.dumps(
            {n: v for n, v in table.items() if n != name}
        ).encode(),
        "an array too many": lambda table: json.dumps(table | {"more": table[name]}).encode(),
        "an array twice": lambda table: (
            b'{"%s": ["<i8", 0, 8], ' % name.encode() + json.dumps(table).encode()[1:]
        ),
        "a list": lambda table: json.dumps([*table.values()]).encode(),
        "no JSON": lambda table: json.dumps(table).encode()[:-2],
        "no UTF-8": lambda table: json.dumps(table).encode().replace(b'"', b"\xff", 1),
        "deep": lambda _: b"[" * 4000,
        "deeper": lambda _: b'{"a":' * 200_000,
        "digits": lambda _: b"9" * 5000,
        "NaN": lambda _: b"NaN",
    }
    way = chance.choice([*ways])
    forged.path.write_bytes(forged.packed(ways[way]))
    return f"the table: {way}: {name}"


def _top(forged: ForgedIndex) -> str:
    chance = forged.chance
    content = forged.packed()
    body = content[TOP.size :]
    number = TOP.unpack_from(content)[3]
    ways: dict[str, Callable[[], bytes]] = {
        "another number": lambda: forged.sealed(
            chance.choice([0, -1, number + 1, number - 1, 2**62, -(2**63)]), body
        ),
        "cut": lambda: content[: chance.randrange(len(content))],
        "cut, and sealed": lambda: forged.sealed(number, body[: chance.randrange(len(body))]),
        "bytes behind it": lambda: forged.sealed(number, body + bytes(chance.choice([1, 8, 512]))),
        "no body": lambda: forged.sealed(chance.choice([0, -1, 1]), b""),
        "another magic": lambda: bytes(16) + content[16:],
    }
    way = chance.choice([*ways])
    forged.path.write_bytes(ways[way]())
    return f"the top: {way}"


def _sparse(forged: ForgedIndex) -> str:
    """Let the last array be a sparse terabyte, as the table says."""
    if not forged.is_records:
        content = forged.packed()
        name = [*forged.arrays][-1]
        nbytes = 1 << 40
        table = {**forged.table, name: [*forged.table[name][:2], nbytes]}
        head = json.dumps(table).encode()
        content = forged.sealed(len(head), head)
        forged.path.write_bytes(content)
    with forged.path.open("ab") as file:
        file.truncate(1 << 40)
    return "a sparse terabyte"


def forge_index(path: Path, number: int) -> str:
    """Forge a sound index, and return what was done.

    Args:
        path: of the index.
        number: which forgery; the same one each time.
    """
    chance = random.Random(number)
    ways = {_array: 40, _table: 30, _top: 14, _sparse: 2}
    if chance.random() < 0.14:
        return in_place_of(path, chance)
    return chance.choices([*ways], [*ways.values()])[0](ForgedIndex(path, chance))
