"""Tensors in messages: what shards represent, and rows of gradients, in bytes behind the JSON.

Their sizes are the user's and show only when a shard is computed, so that no place of the arena is
kept for them. A wire copies them: 1 MB takes about as long as ten small messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch

from quorate.coordination.ownership import whole_subtrees
from quorate.engines.processes.records import Message
from quorate.machine.shared_memory import Segment
from quorate.replica.outputs import parcel
from quorate.replica.shard_sum import ShardSum
from quorate.replica.sparse.rows import Rows
from quorate.replica.whole_batch.represented import Represented, Tensors

_WHICH = "which "  # before a table's name: the indices of its rows; no name has a blank in it


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


def sums_of(results: Sequence[ShardSum], first: int, of: int) -> Message:
    """Return which shards of a run have one gradient, the sum of theirs, if a replica added them.

    Args:
        first: shard of the run.
        of: V, the shards of the step.
    """
    if all(result.gradient is not None for result in results):
        return {}
    return {"sums": whole_subtrees(range(first, first + len(results)), of)}


def by_row(results: Sequence[ShardSum]) -> tuple[Message, Segment | None]:
    """Return what of a run goes as it is: what rows represent, what came out, rows of gradients.

    Returns:
        Fields of a message, none if there is nothing, and the memory that goes with them.
    """
    each = [represented for result in results for represented in result.represented]
    if each:
        return {"kinds": [one.kind for one in each], **packed([one.tensors for one in each])}, None
    gradients = [result.gradient for result in results if result.gradient is not None]
    if any(gradient.rows for gradient in gradients):
        return {"has_rows": True, **packed([_in_pairs(each.rows) for each in gradients])}, None
    if not results or not results[0].outputs:
        return {}, None
    (piece,) = results[0].outputs  # evaluations and predictions are never dealt in runs
    description, memory = parcel.packed(piece.value)
    return {"outputs": description} | ({} if memory is None else {"memory": True}), memory


def deal_out(message: Message) -> None:
    """Give what goes as it is to the parts of the message about the shards of a run."""
    parts = (message, *message.get("more", ()))
    if "has_rows" in message:
        for part, tensors in zip(parts, unpacked(message), strict=True):
            names = [name for name in tensors if not name.startswith(_WHICH)]
            part["rows"] = {name: Rows(tensors[_WHICH + name], tensors[name]) for name in names}
    if "kinds" not in message:
        return
    for part, kind, tensors in zip(parts, message["kinds"], unpacked(message), strict=True):
        part["represented"] = [Represented(kind, tensors)]


def _in_pairs(by_name: Mapping[str, Rows]) -> Tensors:
    pairs: Tensors = {}
    for name, rows in by_name.items():
        pairs |= {_WHICH + name: rows.which, name: rows.values}
    return pairs
