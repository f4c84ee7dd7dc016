"""Tensors in messages: what shards represent, and gradients, in the bytes behind a message's JSON.

Their sizes are the user's and show only when a shard is computed, so that no place of the arena is
kept for them. A wire copies them: 1 MB takes about as long as ten small messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch

from quorate.machine.shared_memory import Segment
from quorate.replica.outputs import parcel
from quorate.replica.shard_sum import ShardSum
from quorate.replica.whole_batch.represented import Represented, Tensors
from quorate.transports.processes.records import Message


def packed(shards: Sequence[Mapping[str, torch.Tensor]]) -> Message:
    """Return fields of a message that have the tensors of each shard of a run. Waits for GPUs."""
    described, blobs = [], []
    for shard in shards:
        described.append(
            [
                [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
                for name, tensor in shard.items()
            ]
        )
        for tensor in shard.values():
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            blobs.append(flat.view(torch.uint8).numpy().tobytes())
    return {"tensors": described, "blob": b"".join(blobs)}


def unpacked(message: Message) -> list[Tensors]:
    """Return the tensors of each shard, in memory of torch's own: bits may depend on alignment."""
    blob, at, shards = message["blob"], 0, []
    for described in message["tensors"]:
        shard: Tensors = {}
        for name, dtype_name, shape in described:
            dtype: torch.dtype = getattr(torch, dtype_name)
            nbytes = prod(shape) * dtype.itemsize
            tensor = torch.empty(shape, dtype=dtype)
            if nbytes:
                source = torch.frombuffer(bytearray(blob[at : at + nbytes]), dtype=torch.uint8)
                tensor.view(-1).view(torch.uint8).copy_(source)
            shard[name], at = tensor, at + nbytes
        shards.append(shard)
    return shards


def by_row(results: Sequence[ShardSum]) -> tuple[Message, Segment | None]:
    """Return what is said of the rows of a run: what they represent, or what came out for them.

    Returns:
        Fields of a message, none if there is nothing, and the memory that goes with them.
    """
    each = [represented for result in results for represented in result.represented]
    if each:
        return {"kinds": [one.kind for one in each], **packed([one.tensors for one in each])}, None
    if not results or not results[0].outputs:
        return {}, None
    (piece,) = results[0].outputs  # evaluations and predictions are never dealt in runs
    description, memory = parcel.packed(piece.value)
    return {"outputs": description} | ({} if memory is None else {"memory": True}), memory


def deal_out(message: Message) -> None:
    """Give what was said of the rows of a run to the parts of the message about its shards."""
    if "kinds" not in message:
        return
    parts = (message, *message.get("more", ()))
    for part, kind, tensors in zip(parts, message["kinds"], unpacked(message), strict=True):
        part["represented"] = [Represented(kind, tensors)]
