"""Forged checkpoints, from a grammar of the format: sound checksums over impossible contents.

    forgery    record | text | header | tensors | file
    record     a key at any level is missing, renamed, odd, of a wrong type or an impossible value
    text       state.json without JSON, deep, with a key twice, or with endless figures
    header     of a tensor file: entries, dtypes, shapes, offsets, metadata, its length, its text
    tensors    unknown to the record, or to the model; counters that count nothing
    file       of another step, of another kind, a FIFO, a device, too large, empty

The forger knows the format: all checksums are made anew, also the ties of tensor files to
their record, unless the tie itself is forged.
"""

import copy
import json
import math
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.forgery.forged import (
    MARKER,
    ODD,
    PLACES,
    RECORD,
    RECORD_SHA256,
    TENSORS,
    Forged,
    Json,
    places_in,
)

# --- records --------------------------------------------------------------------------------------

# Entries with these values may be those of some run: only a wrong type can be found.
FREE = {
    *("engine", "devices", "device_types", "workers", "threads", "precision", "compile", "doubts"),
    *("schedule", "clip_norm", "torch", "python", "processors", "row_sample", "hyperparameters"),
    *("is_augmented", "saved_at", "optimizer_numbers", "deterministic", "kernels"),
    "random",
}
# Entries of every checkpoint.
REQUIRED = {
    *("format", "global_step", "epoch", "seed", "shards", "batch_size", "rows", "shuffle", "order"),
    *("update", "account", "optimizer", "files", "saved_at", "optimizer_numbers"),
}
# Entries compared with the run or with each other: even the next number is refused.
EXACT = REQUIRED - {"account", "saved_at", "optimizer_numbers"} | {"order_sha256", "is_ordered"}
NOWHERE: tuple[Json, ...] = ([[]], {"": [None]}, math.nan, -(10**400))  # wrong at any place
IMPOSSIBLE: dict[tuple[Json, ...], tuple[Json, ...]] = {  # values of the right type
    ("epoch",): (0, 2),
    ("shards",): (0, 13),
    ("account", "not_finite"): (1 << 40, -1, 1.5),
    ("account", "evaluated_at"): (7, -1, True),
    ("account", "dropped_rows"): (-1, "0"),
    ("account", "best"): ("a text", 5),
    ("account", "tally", "staleness", 1): (1, None),
    ("ema_decay",): (1.0, 0, None, "0.9"),
    ("clip_norm",): (0, -1.0, "1"),
    ("kernels",): ("mkl", None),
    ("random",): ("cpu", None),
    ("workers",): (0, 2.0),
    ("saved_at",): (-1, None),
    ("engine",): ("\x1b[2J\x07", None),
}


def forged_record(forged: Forged) -> str:
    """Remove or rename an entry, add an entry, or give an entry an impossible value."""
    chance, record = forged.chance, forged.record
    known = REQUIRED | EXACT | FREE
    trail = chance.choice([place for place in places_in(record) if place[0] in known])
    way = chance.choice(["missing", "renamed", "beside", "nowhere", "nowhere", "near"])
    inside, key, where = forged.inside(trail), trail[-1], ".".join(map(str, trail))
    old, is_entry = inside[key], isinstance(inside, dict)
    if way == "missing" and is_entry and trail[0] in REQUIRED:
        del inside[key]
    elif way == "renamed" and is_entry and (len(trail) == 1 or trail[0] not in FREE):
        del inside[key]
        inside[chance.choice(["digest", "\x1b]0;title\x07", f"{key}s", "../" + str(key)])] = old
    elif way == "beside" and len(trail) == 1:
        inside[chance.choice(["digest", "checkpoint", "\x1b[31m", "same_bit", ""])] = "forged"
    elif way == "near" and trail[0] in EXACT and isinstance(old, (int, str)):
        near = {bool: lambda: not old, int: lambda: old + chance.choice([-1, 1, 7, 1 << 40])}
        inside[key] = near.get(type(old), lambda: f"{old}x")()
    else:
        inside[key] = copy.deepcopy(chance.choice(NOWHERE))
    return f"{where}: {way}: was {old!r}, is {inside.get(key) if is_entry else inside[key]!r}"


# --- texts, headers, tensors, files ---------------------------------------------------------------


def forged_text(forged: Forged) -> str:
    chance = forged.chance

    def inside(value: bytes) -> Callable[[bytes], bytes]:
        return lambda text: text.replace(b'"epoch": ', b'"epoch": %s, "e": ' % value, 1)

    ways: dict[str, Callable[[bytes], bytes]] = {
        "a key twice": lambda text: b'{"shards": 4,' + text[1:],
        "an inner key twice": lambda text: text.replace(
            b'"dropped_rows": 0', b'"dropped_rows": 7, "dropped_rows": 0'
        ),
        "100,000 brackets": inside(b"[" * 100_000 + b"]" * 100_000),
        "100,000 open brackets": lambda text: b"[" * 100_000 + text,
        "a million digits": inside(b"9" * 1_000_000),
        "1e999": inside(b"1e999"),
        "cut": lambda text: text[: chance.randrange(len(text) - 2)],
        "no UTF-8": lambda text: text.replace(b'"epoch"', b'"ep\xffch"', 1),
        "a list": lambda text: b"[" + text + b"]",
        "nothing": lambda text: b"",
        "something behind it": lambda text: text + chance.choice([b"{}", b"\0", text]),
    }
    name = chance.choice([*ways])
    forged.text = ways[name]
    return f"state.json: {name}"


def forged_header(forged: Forged) -> str:
    chance = forged.chance
    file = chance.choice(TENSORS)
    header, data = forged.headers[file], forged.data[file]
    name = forged.tensor(file)
    entry = header[name]
    text = json.dumps(header).encode()
    twice = b"{" + json.dumps(name).encode() + b": " + json.dumps(entry).encode() + b","
    key = chance.choice(["dtype", "shape", "data_offsets"])
    a, b = entry["data_offsets"]
    odd = [v for v in ODD if v != entry[key] and not (key == "shape" and v == [])]
    entries: dict[str, dict[str, Json]] = {
        "odd": {key: copy.deepcopy(chance.choice(odd))},
        "overlapping": {"data_offsets": [max(0, a - 4), b - 4] if a else [a + 4, b + 4]},
        "behind the end": {"data_offsets": [a + (1 << 40), b + (1 << 40)]},
        "in reverse": {"data_offsets": [b + 1, a]},
        "of another size": {"shape": [*entry["shape"], 3]},
        "overflowing": {"shape": [0, 1 << 62, 1 << 62]},
        "of an unknown dtype": {"dtype": "F31"},
        "too long": {"more": 1},
    }
    texts = {
        "no JSON": text[:-2] + b"  ",
        "no UTF-8": text.replace(name[:1].encode(), b"\xff", 1),
        "deep": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
        "with a name twice": twice + text[1:],
    }
    whole = {
        "a length of 2**63": ((1 << 63) + len(text)).to_bytes(8, "little") + text + data,
        "a header of 100 MB": (100_000_000).to_bytes(8, "little") + text + data,
        "an empty file": b"",
    }
    others = ["odd metadata", "the tie of another record", "bytes behind it", "bytes missing"]
    way = chance.choice([*entries, *texts, *whole, *others])
    if way in entries:
        entry.update(entries[way])
    elif way in texts:
        forged.texts[file] = texts[way]
    elif way in whole:
        forged.raw[file] = whole[way]
    elif way == "odd metadata":
        header["__metadata__"] = chance.choice([[], 7, "a"])
    elif way == "the tie of another record":
        forged.keeps_link.add(file)
        header["__metadata__"][RECORD_SHA256] = "0" * 64
    else:
        forged.data[file] = data + b"\0" * 8 if way == "bytes behind it" else data[:-1]
    return f"{file}: {way}: {name}"


def forged_tensors(forged: Forged) -> str:
    """Write sound files with other tensors than in the record or the model."""
    chance = forged.chance
    file = chance.choice(TENSORS)
    held = forged.unpack(file)
    name = chance.choice([*held])
    dtype, shape, content = held[name]
    other = chance.choice([f"{name}x", "exp_avg.nobody", "nothing", "", "\x1b[2J.a", "a" * 999])
    instead: dict[str, dict[str, Any]] = {
        "missing": {},
        "under another name": {other: (dtype, shape, content)},
        "and one more": {name: held[name], other: (dtype, shape, content)},
        "of another shape": {name: (dtype, [*shape, 1], content)},
        "wider": {name: (dtype, [2, *shape], content * 2)},
        "of another dtype": {name: ({"F32": "I32", "I64": "F64"}[dtype], shape, content)},
    }
    way = chance.choice([*instead])
    files, order = [file], forged.record["order"]
    if file != "optimizer.safetensors" and chance.random() < 0.6:  # nothing but the model can tell
        files = ["model.safetensors", "averaged.safetensors"]
        if way == "and one more":
            order.append(other)
        elif name in order and way in ("missing", "under another name"):
            place = order.index(name)
            order[place : place + 1] = [] if way == "missing" else [other]
    elif (file, dtype, shape) == ("optimizer.safetensors", "F32", []) and chance.random() < 0.5:
        value = chance.choice([math.nan, math.inf, -1.0])
        forged.repack(file, {**held, name: (dtype, shape, struct.pack("<f", value))})
        return f"{file}: {name} is {value}"
    for one in files:
        rest = {key: tensor for key, tensor in forged.unpack(one).items() if key != name}
        forged.repack(one, {**rest, **instead[way]})
    return f"{' and '.join(files)}: {name} is {way} ({other!r})"


def forged_file(forged: Forged) -> str:
    """Put something else in the place of a file."""
    chance, path = forged.chance, forged.path
    name = chance.choice([*TENSORS, RECORD, MARKER])
    other = path.parent / "step-000000000004" / name
    if name in TENSORS and chance.random() < 0.4:  # sound, of the same run, of another step
        forged.raw[name] = other.read_bytes()
        forged.write()
        return f"{name} is that of step 4"
    forged.write()
    (path / name).unlink()
    way = chance.choice([*PLACES, "that of another step"])
    if way in PLACES:
        PLACES[way](path / name)
    elif name not in TENSORS:
        shutil.copyfile(other, path / name)
    return f"{name} is {way}"


WAYS: dict[Callable[[Forged], str], int] = {  # and how often each
    forged_record: 45,
    forged_text: 10,
    forged_header: 20,
    forged_tensors: 15,
    forged_file: 8,
}


def forge(path: Path, number: int) -> str:
    """Forge the checkpoint of step 6 in a directory, and return a description.

    Args:
        path: a sound checkpoint, beside the checkpoint of step 4.
        number: the number of the forgery; equal numbers give equal forgeries.
    """
    chance = random.Random(number)
    forged = Forged(path, chance)
    way = chance.choices([*WAYS], [*WAYS.values()])[0]
    said = way(forged)
    if way is not forged_file:
        forged.write()
    return said
