"""What a rank hands over of a step beside its gradient: small, and the same for all ranks to see.

A header in JSON, then the bytes of tensors. Floats come back from JSON as they were.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from quorate.coordination.tree import Node
from quorate.engines import remote_error
from quorate.engines.collective.ranks import Ranks
from quorate.engines.tracing import Batch
from quorate.replica.flat import Flat, Layout
from quorate.replica.notes import Note
from quorate.replica.shard_sum import Part, ShardSum, Share
from quorate.replica.totals import from_json, to_json


class Handed(NamedTuple):
    """What one rank handed over: nothing, the sum of its subtree, or what was raised there."""

    node: Node | None = None
    sum: ShardSum | None = None  # without its gradient
    error: BaseException | None = None
    stop: str | None = None  # why this rank was asked to end
    is_finite: bool = True  # whether this rank's slices of the gradient are
    sends_again: bool = False  # whether what it has sent was not what it had in the end
    notes: Sequence[Note] = ()  # that are new on this rank, if it is another than rank 0
    spans: Batch | None = None  # what it was at, of a run that is traced


def to_bytes(handed: Handed) -> bytes:
    """Return what ``from_bytes`` takes, in another process."""
    beside: dict[str, Any] = {
        "stop": handed.stop,
        "is_finite": handed.is_finite,
        "sends_again": handed.sends_again,
        "notes": handed.notes,
    }
    if handed.spans is not None:
        beside["spans"] = handed.spans
    if handed.error is not None:
        return _packed({**beside, "error": remote_error.to_json(handed.error)}, [])
    if handed.sum is None:
        return _packed(beside, [])
    total = handed.sum
    written = [] if total.written is None else total.written.vectors
    tensors = [total.buffers, total.integer_buffers, *written]
    header = {
        **beside,
        "node": handed.node,
        "weight": total.weight,
        "metrics": total.metrics,
        "missing": None if total.missing is None else sorted(total.missing),
        "shares": total.shares,
        "totals": to_json(total.totals),
    }
    return _packed(header, tensors)


def from_bytes(packed: bytes, written: Layout) -> Handed:
    """Return what a rank handed over.

    Args:
        written: how what forward wrote lies, see ``writes.layout``.
    """
    header, tensors = _unpacked(packed)
    beside = Handed(
        stop=header["stop"],
        is_finite=header["is_finite"],
        sends_again=header["sends_again"],
        notes=[Note(*note) for note in header["notes"]],
        spans=header.get("spans"),
    )
    if "error" in header:
        return beside._replace(error=remote_error.from_json(header["error"]))
    if "node" not in header:
        return beside
    buffers, integer_buffers, *vectors = tensors
    level, index = header["node"]
    missing = header["missing"]
    total = ShardSum(
        weight=header["weight"],
        metrics=header["metrics"],
        buffers=buffers,
        integer_buffers=integer_buffers,
        missing=None if missing is None else frozenset(missing),
        shares=[Share(*share) for share in header["shares"]],
        totals=from_json(header["totals"]),
        written=Flat(written, [v for v in vectors if v is not None]) if vectors else None,
    )
    return beside._replace(node=(level, index), sum=total)


def handed_over(
    ranks: Ranks, own: Handed, written: Layout, hear: Callable[[int, Handed], None]
) -> tuple[list[Part], list[Handed]]:
    """Return the sums of all ranks, and all that they handed over. All ranks call it. Blocks.

    Args:
        own: what this rank hands over.
        written: see ``from_bytes``.
        hear: told what each rank handed over, in the order of ranks.

    Raises:
        Whatever was raised on the lowest rank that raised, on all ranks.
    """
    handed = [from_bytes(packed, written) for packed in ranks.gather(to_bytes(own))]
    for rank, each in enumerate(handed):
        hear(rank, each)
    for each in handed:
        if each.error is not None:
            raise each.error
    parts: list[Part] = []
    for each in handed:
        if each.sum is not None:
            assert each.node is not None
            parts.append((each.node, each.sum))
    return parts, handed


def _packed(header: dict[str, Any], tensors: list[torch.Tensor | None]) -> bytes:
    shapes: list[Any] = []
    parts = []
    for tensor in tensors:
        if tensor is None:
            shapes.append(None)
            continue
        shapes.append([str(tensor.dtype).removeprefix("torch."), list(tensor.shape)])
        values = tensor.detach().cpu().contiguous().reshape(-1)
        parts.append(values.view(torch.uint8).numpy().tobytes())
    text = json.dumps([header, shapes]).encode()
    return b"".join([len(text).to_bytes(8, "little"), text, *parts])


def _unpacked(packed: bytes) -> tuple[dict[str, Any], list[torch.Tensor | None]]:
    at = 8 + int.from_bytes(packed[:8], "little")
    header, shapes = json.loads(packed[8:at])
    tensors: list[torch.Tensor | None] = []
    for shape in shapes:
        if shape is None:
            tensors.append(None)
            continue
        empty = torch.empty(shape[1], dtype=getattr(torch, shape[0]))
        if nbytes := empty.numel() * empty.element_size():
            values = torch.frombuffer(bytearray(packed[at : at + nbytes]), dtype=empty.dtype)
            empty = values.reshape(shape[1])
        tensors.append(empty)
        at += nbytes
    return header, tensors
