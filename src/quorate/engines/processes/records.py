"""Records: the messages that every shard costs, as fields at fixed places in the place of JSON.

A shard is asked for, and is done or left off: that is all that a wire carries while a step is
computed. Whatever is not as usual (parameters without a gradient, totals, changes by user code,
an error) goes as JSON, as all rare messages do; and beside it, as they are, the bytes of tensors
that are of a size that nobody knew when memory was shared. Both ends are of one installation, so
that a record may have another form in each version.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

Message = dict[str, Any]

_NONE = -1  # where there is no slot, or no snapshot: numbers begin at 0

# Kind; is it needed; job, ticket, step, shard, slot; number and version of the snapshot; rank_of.
# The slots of the shards after it follow, if it is a run.
_COMPUTE = struct.Struct("<c?7q2q")
# Kind; is the list of missing parameters empty, or is there none; job, ticket; how many shards, and
# how many metrics. Weight and sums of each shard follow, then the names of the metrics, each ended
# by a line feed.
_DONE = struct.Struct("<c?qqII")
_LEFT_OFF = struct.Struct("<cqq")  # kind; job, ticket
_BLOB = struct.Struct("<cQ")  # kind; length of the rest as JSON, which the bytes of tensors follow

_COMPUTE_FIELDS = {
    *("kind", "job", "ticket", "step", "shard", "slot", "snapshot", "rank_of", "is_needed"),
}
_DONE_FIELDS = {"kind", "job", "ticket", "weight", "metrics", "missing", "totals"}
_LEFT_OFF_FIELDS = {"kind", "job", "ticket"}


def packed(message: Message) -> bytes | None:
    """Return a message as a record; None if there is no record of its kind."""
    if isinstance(message.get("blob"), bytes):
        return _pack_blob(message)
    pack = _PACK.get(message.get("kind"))
    return None if pack is None else pack(message)


def unpacked(record: bytes) -> Message | None:
    """Return the message that a record is of; None if these bytes are no record."""
    unpack = _UNPACK.get(record[:1])
    return None if unpack is None else unpack(record)


def _pack_blob(message: Message) -> bytes:
    rest = json.dumps({name: value for name, value in message.items() if name != "blob"}).encode()
    blob: bytes = message["blob"]
    return _BLOB.pack(b"T", len(rest)) + rest + blob


def _unpack_blob(record: bytes) -> Message:
    _, length = _BLOB.unpack_from(record)
    end = _BLOB.size + length
    return {**json.loads(record[_BLOB.size : end]), "blob": record[end:]}


def _pack_compute(message: Message) -> bytes | None:
    if message.keys() - {"more"} != _COMPUTE_FIELDS:
        return None
    slot, more = message["slot"], message.get("more", ())
    record = _COMPUTE.pack(
        b"C",
        message["is_needed"],
        message["job"],
        message["ticket"],
        message["step"],
        message["shard"],
        _NONE if slot is None else slot,
        *(message["snapshot"] or (_NONE, _NONE)),
        *message["rank_of"],
    )
    slots = [_NONE if each is None else each for each in more]
    return record + struct.pack(f"<{len(slots)}q", *slots) if slots else record


def _unpack_compute(record: bytes) -> Message:
    fields = _COMPUTE.unpack_from(record)
    _, is_needed, job, ticket, step, shard, slot, number, version, rank, workers = fields
    rest = struct.unpack_from(f"<{(len(record) - _COMPUTE.size) // 8}q", record, _COMPUTE.size)
    more = [None if each == _NONE else each for each in rest]
    return {
        "kind": "compute",
        "job": job,
        "ticket": ticket,
        "step": step,
        "shard": shard,
        "slot": None if slot == _NONE else slot,
        "snapshot": None if number == _NONE else [number, version],
        "rank_of": [rank, workers],
        "is_needed": is_needed,
        **({"more": more} if more else {}),
    }


def _pack_done(message: Message) -> bytes | None:
    if message.keys() - {"more"} != _DONE_FIELDS:
        return None
    shards = (message, *message.get("more", ()))
    missing, metrics = message["missing"], message["metrics"]
    names = "".join(f"{name}\n" for name in metrics)
    if names.count("\n") != len(metrics):
        return None  # there is a line feed in a name
    numbers: list[float] = []
    for each in shards:
        if each["missing"] or each["totals"] or each["missing"] != missing:
            return None
        if [*each["metrics"]] != [*metrics]:
            return None
        numbers += (each["weight"], *each["metrics"].values())
    ticket = (message["job"], message["ticket"])
    head = _DONE.pack(b"D", missing is None, *ticket, len(shards), len(metrics))
    sums = struct.pack(f"<{len(numbers)}d", *numbers)
    return head + sums + names.encode(errors="surrogatepass")


def _unpack_done(record: bytes) -> Message:
    _, lacks_missing, job, ticket, shards, count = _DONE.unpack_from(record)
    size = (1 + count) * shards
    numbers = struct.unpack_from(f"<{size}d", record, _DONE.size)
    names = record[_DONE.size + 8 * size :].decode(errors="surrogatepass").split("\n")
    first, *more = (
        {
            "weight": numbers[at],
            # Behind the last name nothing follows.
            "metrics": dict(zip(names, numbers[at + 1 : at + 1 + count], strict=False)),
            "missing": None if lacks_missing else [],
            "totals": {},
        }
        for at in range(0, size, 1 + count)
    )
    run = {"more": more} if more else {}
    return {"kind": "done", "job": job, "ticket": ticket, **first, **run}


def _pack_left_off(message: Message) -> bytes | None:
    if message.keys() != _LEFT_OFF_FIELDS:
        return None
    return _LEFT_OFF.pack(b"L", message["job"], message["ticket"])


def _unpack_left_off(record: bytes) -> Message:
    _, job, ticket = _LEFT_OFF.unpack(record)
    return {"kind": "left off", "job": job, "ticket": ticket}


_PACK: dict[object, Callable[[Message], bytes | None]] = {
    "compute": _pack_compute,
    "done": _pack_done,
    "left off": _pack_left_off,
}
# By the first byte, which is none that JSON begins with.
_UNPACK: dict[bytes, Callable[[bytes], Message]] = {
    b"C": _unpack_compute,
    b"D": _unpack_done,
    b"L": _unpack_left_off,
    b"T": _unpack_blob,
}
