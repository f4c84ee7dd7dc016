"""Records: the messages that every shard costs, as fields at fixed places in the place of JSON.

A shard is asked for, and is done or left off: that is all that a wire carries while a step is
computed. Whatever is not as usual (parameters without a gradient, totals, changes by user code,
an error) goes as JSON, as all rare messages do. Both ends are of one installation, so that a
record may have another form in each version.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

Message = dict[str, Any]

_NONE = -1  # where there is no slot, or no snapshot: numbers begin at 0

# Kind; is it needed; job, ticket, step, shard, slot; number and version of the snapshot; rank_of.
_COMPUTE = struct.Struct("<c?7q2q")
# Kind; is the list of missing parameters empty, or is there none; job, ticket; weight; how many
# metrics. Their sums follow, then their names, each ended by a line feed.
_DONE = struct.Struct("<c?qqdI")
_LEFT_OFF = struct.Struct("<cqq")  # kind; job, ticket

_COMPUTE_FIELDS = {
    *("kind", "job", "ticket", "step", "shard", "slot", "snapshot", "rank_of", "is_needed"),
}
_DONE_FIELDS = {"kind", "job", "ticket", "weight", "metrics", "missing", "totals"}
_LEFT_OFF_FIELDS = {"kind", "job", "ticket"}


def packed(message: Message) -> bytes | None:
    """Return a message as a record; None if there is no record of its kind."""
    pack = _PACK.get(message.get("kind"))
    return None if pack is None else pack(message)


def unpacked(record: bytes) -> Message | None:
    """Return the message that a record is of; None if these bytes are no record."""
    unpack = _UNPACK.get(record[:1])
    return None if unpack is None else unpack(record)


def _pack_compute(message: Message) -> bytes | None:
    if message.keys() != _COMPUTE_FIELDS:
        return None
    slot = message["slot"]
    return _COMPUTE.pack(
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


def _unpack_compute(record: bytes) -> Message:
    _, is_needed, job, ticket, step, shard, slot, number, version, rank, workers = _COMPUTE.unpack(
        record
    )
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
    }


def _pack_done(message: Message) -> bytes | None:
    if message.keys() != _DONE_FIELDS or message["missing"] or message["totals"]:
        return None
    metrics = message["metrics"]
    names = "".join(f"{name}\n" for name in metrics)
    if names.count("\n") != len(metrics):
        return None  # there is a line feed in a name
    lacks_missing, ticket = message["missing"] is None, (message["job"], message["ticket"])
    head = _DONE.pack(b"D", lacks_missing, *ticket, message["weight"], len(metrics))
    sums = struct.pack(f"<{len(metrics)}d", *metrics.values())
    return head + sums + names.encode(errors="surrogatepass")


def _unpack_done(record: bytes) -> Message:
    _, lacks_missing, job, ticket, weight, count = _DONE.unpack_from(record)
    sums = struct.unpack_from(f"<{count}d", record, _DONE.size)
    names = record[_DONE.size + 8 * count :].decode(errors="surrogatepass").split("\n")
    return {
        "kind": "done",
        "job": job,
        "ticket": ticket,
        "weight": weight,
        "metrics": dict(zip(names, sums, strict=False)),  # behind the last name nothing follows
        "missing": None if lacks_missing else [],
        "totals": {},
    }


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
}
