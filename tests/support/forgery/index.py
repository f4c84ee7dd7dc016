"""Forged indexes of tar, text and TFRecord files: right checksums over impossible contents.

forgery   array | table | top | file
array     a value at any place: negative, huge, or of another row; wrong lengths and orders
table     of the arrays' dtypes, places and sizes: odd, different, no JSON, deep, twice
top       wrong sizes of header and body, cut, something behind, another magic
file      a substitute in the place of the file, see ``in_place_of``
"""

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
from support.forgery.forged import ODD, in_place_of

TOP = struct.Struct("<16sqqqI")  # of both formats: magic, size, time, a length, CRC-32C
WRONG = (-1, -(2**63), 2**63 - 1, 2**40, 0, 1, 7, 511, 512, 10_000)
DTYPES = ("<f8", "<i4", ">i8", "|O", "|V8", "<M8[ns]", "nothing", "", None, 7, [])


class ForgedIndex:
    """An index in memory, to be changed and written with a sound checksum."""

    def __init__(self, path: Path, chance: random.Random) -> None:
        self.path, self.chance = path, chance
        content = path.read_bytes()
        self.magic, self.size, self.changed_ns, number, _ = TOP.unpack_from(content)
        self.is_records = self.magic.startswith(b"quorate-index")
        rest = content[TOP.size :]
        table: dict[str, Any] = {"offsets": ["<i8", TOP.size, len(rest)]}
        if not self.is_records:
            table = json.loads(rest[:number])
        self.arrays = {
            name: np.frombuffer(content[at : at + nbytes], dtype=dtype)
            for name, (dtype, at, nbytes) in table.items()
        }

    def packed(
        self, text: Callable[[Any], bytes] = lambda table: json.dumps(table).encode()
    ) -> bytes:
        """Return an index of these arrays; ``text`` makes the table from the right table."""
        if self.is_records:
            offsets = self.arrays["offsets"]
            return self.sealed(len(offsets) - 1, offsets.tobytes())
        head = b""
        for _ in range(4):  # the beginning of arrays depends on the length of the table
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
        """Return a body below a top with the body's checksum."""
        crc = google_crc32c.value(body)
        return TOP.pack(self.magic, self.size, self.changed_ns, number, crc) + body


def _array(forged: ForgedIndex) -> bytes:
    chance = forged.chance
    name = chance.choice([*forged.arrays])
    array = forged.arrays[name].copy()
    wrong = chance.choice((*WRONG, forged.size, forged.size + 1))
    if array.dtype.itemsize < 8:
        wrong %= 256 if array.dtype.itemsize == 1 else 1 << 31
    match chance.randrange(6):
        case 0 | 1 if len(array):
            array[chance.randrange(len(array))] = wrong
        case 2:
            array[:] = wrong
        case 3:
            array = array[:-1]
        case 4:
            array = np.append(array, np.array([wrong], array.dtype))
        case _:
            array = array[::-1].copy()
    forged.arrays[name] = array
    return forged.packed()


def _table(forged: ForgedIndex) -> bytes:
    if forged.is_records:
        return _top(forged)
    chance = forged.chance
    name, place = chance.choice([*forged.arrays]), chance.randrange(3)
    odd = chance.choice(DTYPES if place == 0 else (*ODD, *WRONG))

    def with_odd(table: dict[str, Any]) -> bytes:
        entry = [odd if n == place else value for n, value in enumerate(table[name])]
        return json.dumps(table | {name: entry}).encode()

    ways: list[Callable[[dict[str, Any]], bytes]] = [
        *[with_odd] * 4,
        lambda table: json.dumps(table | {name: odd}).encode(),
        lambda table: b'{"%s": ["<i8", 0, 8], ' % name.encode() + json.dumps(table).encode()[1:],
        lambda table: json.dumps([*table.values()]).encode(),
        lambda table: json.dumps(table).encode()[:-2],
        lambda table: b'{"a":' * 200_000,
    ]
    return forged.packed(chance.choice(ways))


def _top(forged: ForgedIndex) -> bytes:
    chance = forged.chance
    content = forged.packed()
    body, number = content[TOP.size :], TOP.unpack_from(content)[3]
    other = chance.choice([0, -1, number + 1, number - 1, 2**62, -(2**63)])
    return chance.choice(
        [
            forged.sealed(other, body),
            content[: chance.randrange(len(content))],
            forged.sealed(number, body[: chance.randrange(len(body))]),
            forged.sealed(number, body + bytes(chance.choice([1, 8, 512]))),
            forged.sealed(chance.choice([0, -1, 1]), b""),
            bytes(16) + content[16:],
        ]
    )


def forge_index(path: Path, number: int) -> str:
    """Forge a sound index, always the same way for a number, and return a description."""
    chance = random.Random(number)
    if chance.random() < 0.14:
        return in_place_of(path, chance)
    way = chance.choices([_array, _table, _top], [40, 30, 14])[0]
    path.write_bytes(way(ForgedIndex(path, chance)))
    return f"{path.name}:{way.__name__}"
