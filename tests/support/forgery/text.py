"""Records that are no JSON, or deep, or say a thing twice."""

from __future__ import annotations

import json
from collections.abc import Callable

from support.forgery.forged import Forged

from quorate.services.checkpoints.record import MOST_BYTES


def forged_text(forged: Forged) -> str:
    chance = forged.chance

    def twice(text: bytes) -> bytes:
        names = [*forged.record]
        name = chance.choice(names)
        return b'{"%s": %s,' % (name.encode(), json.dumps(forged.record[name]).encode()) + text[1:]

    def inner_twice(text: bytes) -> bytes:
        return text.replace(b'"dropped_rows": 0', b'"dropped_rows": 7, "dropped_rows": 0')

    def inside(value: bytes) -> Callable[[bytes], bytes]:
        return lambda text: text.replace(b'"epoch": ', b'"epoch": %s, "e": ' % value, 1)

    ways: dict[str, Callable[[bytes], bytes]] = {
        "a key twice": twice,
        "an inner key twice": inner_twice,
        "100,000 brackets": inside(b"[" * 100_000 + b"]" * 100_000),
        "100,000 open brackets": lambda text: b"[" * 100_000 + text,
        "100 objects in each other": inside(b'{"a":' * 100 + b"1" + b"}" * 100),
        "a million digits": inside(b"9" * 1_000_000),
        "1e999": inside(b"1e999"),
        "cut": lambda text: text[: chance.randrange(len(text) - 2)],
        "no UTF-8": lambda text: text.replace(b'"epoch"', b'"ep\xffch"', 1),
        "UTF-16": lambda text: text.decode().encode("utf-16"),
        "a list": lambda text: b"[" + text + b"]",
        "a number": lambda text: b"6",
        "null": lambda text: b"null",
        "nothing": lambda text: b"",
        "quotes without end": lambda text: b'"' + b'\\"' * 100_000,
        "something behind it": lambda text: text + chance.choice([b"{}", b"\0", text]),
        "too large": lambda text: (
            text + b" " * MOST_BYTES if chance.random() < 0.1 else text + b"x"
        ),
    }
    name = chance.choice([*ways])
    forged.text = ways[name]
    return f"state.json: {name}"
