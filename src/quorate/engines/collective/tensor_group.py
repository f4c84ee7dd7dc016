"""Groups of ranks that exchange tensors by gloo, or by what a device has; no other code sees them.

``torch.distributed.init_process_group`` would make a default group, and a script that was written
for DDP would find it: ``is_initialized()`` would be true within the loss, which would then divide
by the number of ranks, or wait for a rank that has no shard. So a group is made from a store
directly, and ``torch.distributed`` knows of none.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from quorate.replica.torch_internals import new_backend, sent_together

_dist: Any = dist  # documented, and not declared to be exported

Addressed = tuple[int, torch.Tensor]  # a rank of the group, and what goes there or comes from there


class TensorGroup:
    """Ranks that exchange tensors of one kind of device. ``close`` it.

    Every rank of the group makes it, and makes the same calls in the same order. A call returns
    works, each of which has ``wait()``: tensors must live until then. One thread at a time.

    Args:
        store: that all ranks of the group reach.
        name: that no other group of this store has.
        rank: this one's number in the group.
        size: how many ranks the group has.
        timeout: of each call.
        device_type: "cpu" for gloo, which connects all ranks now and blocks; any other for what
            torch has for it: NCCL for "cuda", which connects them in the first call.

    Raises:
        RuntimeError: ranks could not be connected.
        ValueError: torch has nothing for this kind of device.
    """

    def __init__(
        self,
        store: Any,
        name: str,
        rank: int,
        size: int,
        timeout: timedelta,
        device_type: str = "cpu",
    ) -> None:
        self._is_gloo = device_type == "cpu"
        store = _dist.PrefixStore(name, store)
        self._backend = new_backend(device_type, store, rank, size, timeout)

    def close(self, *, is_broken: bool = False) -> None:
        """Leave the group. Blocks for a moment; a call that is under way may raise.

        Args:
            is_broken: a rank is lost: calls that wait for that rank are aborted.
        """
        backend, self._backend = self._backend, None
        if backend is not None and not self._is_gloo:  # gloo ends with its last reference
            if is_broken:  # shutdown waits for calls that never end
                backend.abort()
            else:
                backend.shutdown()

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Give all ranks the values that a tensor has on rank ``source``. Blocks."""
        self._backend.broadcast([tensor], _from(source)).wait()

    def begin_gather(self, own: torch.Tensor, into: Sequence[torch.Tensor]) -> Any:
        """Begin to copy the tensor of each rank to all ranks: tensors of one shape, by rank."""
        return self._backend.allgather([[*into]], [own])

    def begin_sum(self, parts: Sequence[torch.Tensor], own: torch.Tensor) -> Any:
        """Begin to add one part for each rank over all ranks; ``own`` takes this rank's sum."""
        return self._backend.reduce_scatter([own], [[*parts]])

    def begin_swap(self, sends: Sequence[Addressed], takes: Sequence[Addressed]) -> list[Any]:
        """Begin to send tensors and to receive others.

        Between two ranks the first tensor that is sent is the first that is received.
        """
        backend = self._backend
        calls = [(backend.send, [tensor], rank) for rank, tensor in sends]
        calls += [(backend.recv, [tensor], rank) for rank, tensor in takes]
        return sent_together(backend, calls)

    def wait_for_all(self) -> None:
        """Return when all ranks of the group have come here. Blocks."""
        self._backend.barrier().wait()


def _from(source: int) -> Any:
    options = _dist.BroadcastOptions()
    options.rootRank = source
    options.rootTensor = 0
    return options
