"""Forged files of a run directory beside its checkpoints: logs, status, profile, lock.

forgery   content | text | lines | place
content   a value at any place of the JSON that is odd, or an entry that is missing or renamed
text      no JSON, deep, wide, cut, a key twice, digits without end, no UTF-8, bytes behind it
lines     of metrics.jsonl: in another order, twice, without an end, very long, very many
place     something else in the place of the file, see ``in_place_of``
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from support.forgery.forged import ODD
from support.forgery.places import in_place_of

Json = Any
FILES = (
    "metrics.jsonl",
    "metrics.jsonl",
    "metrics.jsonl",
    "status.json",
    "profile.json",
    "run.lock",
)
HUGE = (10**15, 1 << 53, 10**400, 1e308, 1e12, 10_000_000, "NaN", "Infinity", "1", -0.0, 5e-324)


def _places(value: Json, trail: tuple[Json, ...] = ()) -> Iterator[tuple[Json, ...]]:
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*trail, key)
        if isinstance(inner, (dict, list)):
            yield from _places(inner, (*trail, key))


def _changed(record: Json, chance: random.Random) -> str:
    """Change a record at one place, and return what was done."""
    trail = chance.choice([*_places(record)])
    inside = record
    for key in trail[:-1]:
        inside = inside[key]
    key, where = trail[-1], ".".join(map(str, trail))
    way = chance.choice(["odd", "odd", "huge", "missing", "renamed", "longer"])
    if way == "missing":
        del inside[key]
    elif way == "renamed" and isinstance(inside, dict):
        inside[chance.choice([f"{key}s", "\x1b[2J", "", "\u202e"])] = inside.pop(key)
    elif way == "longer" and isinstance(inside[key], list):
        inside[key] = inside[key] * chance.choice([2, 1000, 100_000])
    else:
        inside[key] = chance.choice(HUGE if way == "huge" else ODD)
    return f"{where}: {way}"


def _texts(text: bytes, chance: random.Random) -> dict[str, bytes]:
    """Return what may stand for the text of a JSON object."""
    at = text.index(b": ") + 2

    def inside(value: bytes) -> bytes:
        return text[:at] + value + b', "more": ' + text[at:]

    return {
        "empty": b"",
        "a number": b"6",
        "a list": b"[" + text + b"]",
        "null": b"null",
        "cut": text[: chance.randrange(len(text))],
        "a key twice": b'{"global_step": 0, "state": "x", ' + text[1:],
        "deep": b"[" * 100_000,
        "deep objects": inside(b'{"a":' * 5000 + b"1" + b"}" * 5000),
        "wide": inside(b"[" + b"{}," * 1_000_000 + b"{}]"),
        "wider": inside(b"[" + b"300," * 12_000_000 + b"1]"),
        "400 digits": inside(b"9" * 400),
        "a million digits": inside(b"9" * 1_000_000),
        "1e999": inside(b"1e999"),
        "NaN": inside(b"NaN"),
        "-Infinity": inside(b"-Infinity"),
        "a lone surrogate": inside(rb'"\ud800"'),
        "no UTF-8": text[:3] + b"\xff\xfe" + text[3:],
        "UTF-16": text.decode().encode("utf-16"),
        "a mark of byte order": b"\xef\xbb\xbf" + text,
        "zeros": bytes(10_000),
        "quotes": b'"' + b'\\"' * 100_000,
        "something behind it": text + chance.choice([b"{}", b"\0", text]),
        "a text of 100 MB": inside(b'"' + b"x" * 100_000_000 + b'"'),
    }


def _of_lines(lines: list[bytes], chance: random.Random) -> str:
    number = chance.randrange(len(lines))
    line = lines[number]
    ways: dict[str, Callable[[], object]] = {
        "in another order": lambda: lines.reverse(),
        "one twice": lambda: lines.insert(number, line),
        "one without an end": lambda: lines.append(line[: len(line) // 2]),
        "no ends": lambda: lines.__setitem__(slice(None), [e.strip() for e in lines]),
        "a long one": lambda: lines.insert(number, b"x" * 30_000_000 + b"\n"),
        "zeros": lambda: lines.insert(number, bytes(1 << 20)),
        "a hole": lambda: lines.__setitem__(number, b"\n"),
        "very many": lambda: lines.__setitem__(slice(None), [b"{}\n"] * 500_000),
        "many evaluations": lambda: lines.__setitem__(
            slice(None), [b'{"global_step": 1, "validation": {}}\n'] * 10_000
        ),
        "returns": lambda: lines.__setitem__(slice(None), [e.replace(b"\n", b"\r") for e in lines]),
    }
    way = chance.choice([*ways])
    ways[way]()
    return f"lines: {way}"


def forge_log(run_dir: Path, number: int) -> str:
    """Forge a file of a sound run directory, and return what was done.

    Args:
        run_dir: has all of ``FILES``.
        number: which forgery; the same one each time.
    """
    chance = random.Random(number)
    path = run_dir / chance.choice(FILES)
    way = chance.choices(["content", "text", "lines", "place"], [45, 30, 10, 15])[0]
    if way == "place":
        return in_place_of(path, chance)
    lines = path.read_bytes().splitlines(keepends=True)
    if path.name != "metrics.jsonl":
        lines = [b"".join(lines)]
    if way == "lines" and path.name == "metrics.jsonl":
        done = _of_lines(lines, chance)
    else:
        at = chance.choice([0, len(lines) - 1, chance.randrange(len(lines))])
        if way == "text":
            texts = _texts(lines[at].strip(), chance)
            done = chance.choice([*texts])
            lines[at] = texts[done] + b"\n"
        else:
            record = json.loads(lines[at])
            done = _changed(record, chance)
            if chance.random() < 0.3:
                done = f"{done}, {_changed(record, chance)}" if record else done
            lines[at] = json.dumps(record).encode() + b"\n"
        done = f"line {at}: {done}"
    path.write_bytes(b"".join(lines))
    return f"{path.name}: {done}"
