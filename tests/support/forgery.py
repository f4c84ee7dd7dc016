"""Forged checkpoints, from a grammar of the format: sound checksums over what cannot be.

    forgery    record | text | header | tensors | file | folder
    record     a key at any level is missing, renamed, odd, of a wrong type or an impossible value
    text       state.json that is no JSON, is deep, has a key twice, has figures without end
    header     of a tensor file: entries, dtypes, shapes, offsets, metadata, its length, its text
    tensors    others than the record names, or than the model has; counters that count nothing
    file       of another step, of another kind, a FIFO, a device, too large, empty
    folder     under another name; without its marker

Whoever forges knows the format: all checksums are made anew, also those that tie tensor files to
their record, unless they are what is forged.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from quorate.services.checkpoints.files import MARKER, RECORD, RECORD_SHA256
from quorate.services.checkpoints.record import MOST_BYTES, body_sha256
from quorate.services.checkpoints.tensor_file import MOST_HEADER_BYTES

Json = Any
TENSORS = ("model.safetensors", "averaged.safetensors", "optimizer.safetensors")
ODD: tuple[Json, ...] = (
    *(None, True, False, 0, -1, 1.5, 6.0, 10**30, -(10**400), math.nan, math.inf, -math.inf),
    *("", "6", "a text", "\x1b[2J\x07", "\u202e", "\ud800", [], [[]], {}, {"": None}, [None, {}]),
)
# What is free: any value of its type is that of some run. Of these only the type can be forged.
FREE = {
    *("engine", "devices", "device_types", "workers", "threads", "precision", "compile"),
    *("schedule", "clip_norm", "torch", "python", "processors", "row_sample", "hyperparameters"),
    *("doubts", "is_augmented", "saved_at", "optimizer_numbers", "deterministic"),
    "kernels",
}
# What is compared; of an entry that is none of these nothing is known here.
COMPARED = {
    *("format", "global_step", "epoch", "seed", "shards", "batch_size", "rows", "shuffle"),
    *("last", "sampling", "sampled_rows", "order_sha256"),
    *("is_ordered", "update", "ema_decay", "account", "order", "optimizer", "files"),
    *("optimizer_state", "optimizer_attributes", "optimizer_groups", "schedule_state"),
    "amendments",
}
# Records of before have none of these.
OPTIONAL = {
    *FREE,
    "is_ordered",
    "ema_decay",
    "last",
    "sampling",
    "sampled_rows",
    "order_sha256",
} - {
    "saved_at",
    "optimizer_numbers",
}
OPTIONAL |= {"optimizer_state", "optimizer_attributes", "optimizer_groups", "schedule_state"}
OPTIONAL |= {"amendments"}


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


# --- record ---------------------------------------------------------------------------------------


def _places(value: Json, trail: tuple[Json, ...] = ()) -> Iterator[tuple[Json, ...]]:
    """Yield the keys and indices that lead to every value at every level."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        if not trail and key == "hyperparameters":  # of any optimizer: anything
            yield (key,)
            continue
        yield (*trail, key)
        if isinstance(inner, (dict, list)):
            yield from _places(inner, (*trail, key))


def _at(record: Json, trail: tuple[Json, ...]) -> tuple[Json, Json]:
    for key in trail[:-1]:
        record = record[key]
    return record, trail[-1]


def _record(forged: Forged) -> str:
    chance, record = forged.chance, forged.record
    known = {*COMPARED, *FREE}
    trail = chance.choice([place for place in _places(record) if place[0] in known])
    inside, key = _at(record, trail)
    old, where = inside[key], ".".join(map(str, trail))
    way = chance.choice(["missing", "renamed", "odd", "beside", "near"])
    if way == "missing" and isinstance(inside, dict) and trail[0] not in OPTIONAL:
        del inside[key]
        return f"{where} is missing"
    if way == "renamed" and isinstance(inside, dict) and not _is_free(trail, inner=True):
        del inside[key]
        inside[chance.choice(["digest", "\x1b]0;title\x07", f"{key}s", "../" + str(key)])] = old
        return f"{where} has another name"
    if way == "beside" and len(trail) == 1:
        inside[chance.choice(["digest", "checkpoint", "\x1b[31m", "same_bit", ""])] = "forged"
        return "an entry that nobody knows"
    if way == "near" and not _is_free(trail) and not isinstance(old, (dict, list)):
        near = _near(old, chance)
        if near is not None and near != old and _is_wrong(trail, near, record):
            inside[key] = near
            return f"{where} is {near!r}, and was {old!r}"
    odd = chance.choice([value for value in ODD if _is_wrong(trail, value, record)])
    inside[key] = copy.deepcopy(odd)
    return f"{where} is {odd!r}, and was {old!r}"


def _is_free(trail: tuple[Json, ...], *, inner: bool = False) -> bool:
    return trail[0] in FREE and (inner is False or len(trail) > 1)


def _near(old: Json, chance: random.Random) -> Json:
    if isinstance(old, bool):
        return not old
    if isinstance(old, int):
        return old + chance.choice([-1, 1, 7, 1 << 40])
    if isinstance(old, str):
        return chance.choice([old[:-1], old + "x", old.upper(), old + "\n"])
    return None


def _is_wrong(trail: tuple[Json, ...], value: Json, record: dict[str, Json]) -> bool:
    """Whether a value at a place makes a record wrong, by the words of docs/checkpoints.md."""
    name, step = trail[0], record["global_step"]
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 1 << 53
    is_line = isinstance(value, str) and not any(ord(c) < 32 or 127 <= ord(c) < 160 for c in value)
    inner = len(trail) > 1
    if name in ("optimizer_groups", "schedule_state") and ("values" in trail or "dict" in trail):
        return _is_other_kind(trail, value, record)
    if name in ("optimizer_state", "schedule_state", "amendments") and not inner:
        return value is not None
    if name in ("optimizer_attributes", "optimizer_groups") and not inner:
        return value not in ({}, []) or isinstance(value, list) != (name == "optimizer_groups")
    if name == "amendments" and trail[1] in ("number", "frozen"):
        return not is_count
    if name == "amendments" and len(trail) == 2:
        return value != ([] if trail[1] == "switched_off" else {})
    if name in ("hyperparameters", "row_sample", "optimizer_numbers"):
        if name == "hyperparameters":
            return not (isinstance(value, list) and all(isinstance(v, dict) for v in value))
        if inner:
            return not (value is None or isinstance(value, str))
        return not (value == {} or (name == "row_sample" and value is None))
    if name == "doubts":
        return not (value == [] or (inner and isinstance(value, str)))
    if name in ("devices", "device_types", "processors"):
        return not (is_line if inner else value == [])
    if name in ("engine", "precision", "torch", "python"):
        return not is_line
    if name == "schedule":
        return not (value is None or is_line)
    if name in ("workers", "threads"):
        return not (value is None or (is_count and value >= 1))
    if name == "kernels":
        return value not in ("torch", "onednn")
    if name in ("compile", "is_augmented", "deterministic"):
        return not (isinstance(value, bool) or (name == "deterministic" and value is None))
    if name == "clip_norm":
        return not (value is None or (is_number and 0 < value < 10**300))
    if name == "saved_at":
        return not (is_number and 0 <= value < 250_000_000_000)
    if name == "seed":
        return value != record["seed"] or isinstance(value, (bool, float))
    if name == "ema_decay":
        return not (is_number and 0 < value < 1)
    if name == "account" and inner:
        if trail[1] in ("dropped_rows",):
            return not is_count
        if trail[1] == "not_finite":
            return not (is_count and value <= step + 1)
        if trail[1] == "evaluated_at":
            return not (is_count and value <= step)
        if trail[1] == "left_open" and len(trail) == 2:
            return value != []
        if trail[1] == "best" and len(trail) == 2:
            return value is not None
        if trail[1] == "tally" and len(trail) == 4:
            if trail[2:] == ("staleness", 1):
                return not (is_count and value == 0)
            return not is_count
    if name == "rows" and is_count and value:
        return True  # another data set
    if name == "optimizer":
        return value != record["optimizer"]
    return True


def _is_other_kind(trail: tuple[Json, ...], value: Json, record: dict[str, Json]) -> bool:
    """Whether a value in a tree is one that cannot have its place: a text for a number, say."""
    inside, key = _at(record, trail)
    old = inside[key]
    if isinstance(value, float) and not math.isfinite(value):
        return True  # it is written as {"float": "nan"}
    if isinstance(old, list) and value == []:
        return "dict" in trail[-1:]  # a list may be of any length, but its keys have to be there
    if isinstance(old, (list, dict)) or isinstance(value, (list, dict)):
        return not (isinstance(old, (list, dict)) and value == old)
    if trail[-1] == 0 and trail[-3:-2] == ("dict",):
        return value != old  # a key
    if old is None:
        return False
    if isinstance(old, bool) or isinstance(value, bool):
        return type(old) is not type(value)
    if isinstance(old, (int, float)):
        return not (isinstance(value, (int, float)) and abs(value) < 10**300)
    return not isinstance(value, type(old))


# --- the text of the record -----------------------------------------------------------------------


def _text(forged: Forged) -> str:
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


# --- headers --------------------------------------------------------------------------------------


def _header(forged: Forged) -> str:
    chance = forged.chance
    file = chance.choice(TENSORS)
    header, data = forged.headers[file], forged.data[file]
    name = forged.tensor(file)
    entry = header[name]
    text = json.dumps(header).encode()

    def offsets(change: Callable[[int, int], list[Json]]) -> Callable[[], None]:
        def apply() -> None:
            entry["data_offsets"] = change(*entry["data_offsets"])

        return apply

    def odd_entry() -> None:
        key = chance.choice(["dtype", "shape", "data_offsets"])
        wrong = [v for v in ODD if v != entry[key] and not (key == "shape" and v == [])]
        entry[key] = copy.deepcopy(chance.choice(wrong))

    def set_text(value: bytes) -> Callable[[], None]:
        return lambda: forged.texts.update({file: value})

    def set_length(change: Callable[[int], int]) -> Callable[[], None]:
        def apply() -> None:
            forged.raw[file] = change(len(text)).to_bytes(8, "little") + text + data

        return apply

    ways: dict[str, Callable[[], None]] = {
        "an odd entry": odd_entry,
        "offsets that overlap": offsets(
            lambda a, b: [max(0, a - 4), b - 4] if a else [a + 4, b + 4]
        ),
        "offsets behind the end": offsets(lambda a, b: [a + (1 << 40), b + (1 << 40)]),
        "offsets in reverse": offsets(lambda a, b: [b + 1, a]),
        "offsets below zero": offsets(lambda a, b: [a - (1 << 20), b - (1 << 20)]),
        "one offset": offsets(lambda a, b: [a]),
        "huge offsets": offsets(lambda a, b: [a, 10**30]),
        "true for 1": lambda: entry.update(shape=[True, *entry["shape"]]),
        "a shape of other size": lambda: entry.update(shape=[*entry["shape"], 3]),
        "a shape without end": lambda: entry.update(shape=[1] * 100_000),
        "an overflowing shape": lambda: entry.update(shape=[0, 1 << 62, 1 << 62]),
        "an unknown dtype": lambda: entry.update(dtype="F31"),
        "a dtype of other size": lambda: entry.update(dtype="F16"),
        "an entry too many": lambda: entry.update(more=1),
        "a tensor that is no entry": lambda: header.update({name: 7}),
        "metadata of a wrong type": lambda: header.update(__metadata__=chance.choice([[], 7, "a"])),
        "metadata that are no strings": lambda: header["__metadata__"].update(a=1),
        "the tie of another record": lambda: (
            forged.keeps_link.add(file) or header["__metadata__"].update({RECORD_SHA256: "0" * 64})
        ),
        "no JSON": set_text(text[:-2] + b"  "),
        "no UTF-8": set_text(text.replace(name[:1].encode(), b"\xff", 1)),
        "a deep header": set_text(b'{"a":' * 50_000 + b"1" + b"}" * 50_000),
        "a name twice": set_text(
            b"{" + json.dumps(name).encode() + b": " + json.dumps(entry).encode() + b"," + text[1:]
        ),
        "a list": set_text(b"[" + text + b"]"),
        "a length of 0": set_length(lambda n: 0),
        "a length too small": set_length(lambda n: n - 1),
        "a length too large": set_length(lambda n: n + 8),
        "a length of 2**63": set_length(lambda n: (1 << 63) + n),
        "a header of 100 MB": set_length(lambda n: 100_000_000),
        "bytes behind the end": lambda: forged.data.update({file: data + b"\0" * 8}),
        "bytes missing": lambda: forged.data.update({file: data[:-1]}),
        "an empty file": lambda: forged.raw.update({file: b""}),
        "seven bytes": lambda: forged.raw.update({file: b"\2\0\0\0\0\0\0"}),
    }
    if chance.random() < 0.01:
        # It is there as a whole, as the format wants it: spaces behind the JSON.
        padded = text + b" " * (MOST_HEADER_BYTES + 8 - len(text))
        ways = {"a header that is larger than allowed": set_text(padded)}
    way = chance.choice([*ways])
    ways[way]()
    return f"{file}: {way}: {name}"


# --- tensors --------------------------------------------------------------------------------------


def _tensors(forged: Forged) -> str:
    """Files that are sound by themselves, and hold other tensors than the record or the model."""
    chance = forged.chance
    file = chance.choice(TENSORS)
    held = forged.unpack(file)
    name = chance.choice([*held])
    dtype, shape, content = held[name]
    both = ("model.safetensors", "averaged.safetensors")
    files = [file]

    def missing(held: dict[str, Any]) -> None:
        del held[name]

    def renamed(held: dict[str, Any]) -> None:
        held[chance_name] = held.pop(name)

    def more(held: dict[str, Any]) -> None:
        held[chance_name] = (dtype, shape, content)

    def shaped(held: dict[str, Any]) -> None:
        held[name] = (dtype, [*shape, 1], content)

    def wider(held: dict[str, Any]) -> None:
        held[name] = (dtype, [2, *shape], content * 2)

    def typed(held: dict[str, Any]) -> None:
        other = {"F32": "I32", "I64": "F64"}[dtype]
        held[name] = (other, shape, content)

    chance_name = chance.choice(
        [f"{name}x", "exp_avg.nobody", "nothing", "", "\x1b[2J.a", "a" * 999]
    )
    ways: dict[str, Callable[[dict[str, Any]], None]] = {
        "missing": missing, "under another name": renamed, "and one more": more,
        "of another shape": shaped, "wider": wider, "of another dtype": typed,
    }  # fmt: skip
    way = chance.choice([*ways])
    if file in both and chance.random() < 0.6:  # nothing but the model can tell
        files = [*both]
        if name in forged.record["order"] and way in ("missing", "under another name"):
            place = forged.record["order"].index(name)
            forged.record["order"][place : place + 1] = [] if way == "missing" else [chance_name]
        elif way == "and one more":
            forged.record["order"].append(chance_name)
    if file == "optimizer.safetensors" and dtype == "F32" and shape == [] and chance.random() < 0.5:
        import struct

        value = chance.choice([math.nan, math.inf, -1.0])
        held[name] = (dtype, shape, struct.pack("<f", value))
        forged.repack(file, held)
        return f"{file}: {name} is {value}"
    for one in files:
        held = forged.unpack(one)
        ways[way](held)
        forged.repack(one, held)
    return f"{' and '.join(files)}: {name} is {way} ({chance_name!r})"


# --- files and folders ----------------------------------------------------------------------------


def _file(forged: Forged) -> str:
    """Something else in the place of a file; what follows the write is not undone by it."""
    chance, path = forged.chance, forged.path
    names = [*TENSORS, RECORD, MARKER]
    name = chance.choice(names)
    target = path / name
    other = path.parent / "step-000000000004" / name
    if name in TENSORS and chance.random() < 0.4:
        # Sound, of the same run, of another step.
        forged.raw[name] = other.read_bytes()
        forged.write()
        return f"{name} is that of step 4"
    forged.write()
    target.unlink()
    ways: dict[str, Callable[[], None]] = {
        "a FIFO": lambda: os.mkfifo(target),
        "a directory": target.mkdir,
        "a link to /dev/zero": lambda: target.symlink_to("/dev/zero"),
        "a link to a FIFO": lambda: (os.mkfifo(path / "pipe"), target.symlink_to(path / "pipe"))[0],
        "a dangling link": lambda: target.symlink_to(path / "nothing"),
        "a link to itself": lambda: target.symlink_to(target),
        "missing": lambda: None,
        "a sparse terabyte": lambda: (target.write_bytes(b""), os.truncate(target, 1 << 40))[1],
        "that of another step": lambda: None if name in TENSORS else _copied(other, target),
    }
    way = chance.choice([*ways])
    ways[way]()
    return f"{name} is {way}"


def _copied(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)


def _folder(forged: Forged) -> str:
    forged.write()
    names = ["step-000000000009", "step-6", "step-٠٠٠٠٠٠٠٠٠٠٠٦", "step-0000000000006"]
    name = forged.chance.choice(names)
    forged.path.rename(forged.path.with_name(name))
    return f"its folder is {name}"


WAYS: dict[Callable[[Forged], str], int] = {
    _record: 45, _text: 10, _header: 20, _tensors: 15, _file: 8, _folder: 2
}  # fmt: skip


def forge(path: Path, number: int) -> str:
    """Forge the checkpoint of step 6 in a directory, and return what was done.

    Args:
        path: a sound checkpoint, beside that of step 4.
        number: which forgery; the same one each time.
    """
    chance = random.Random(number)
    forged = Forged(path, chance)
    way = chance.choices([*WAYS], [*WAYS.values()])[0]
    said = way(forged)
    if way not in (_file, _folder):
        forged.write()
    return said
