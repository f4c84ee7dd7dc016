"""Groups of ranks that exchange tensors by gloo, NCCL or another backend of torch.distributed.

``torch.distributed.init_process_group`` would make a default group, and a script that was written
for DDP would find the group: ``is_initialized()`` would be true within the loss, which would then
divide by the number of ranks, or wait for a rank that has no shard. So a group is made from a store
directly, and ``torch.distributed`` knows no group.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from quorate.replica.torch_internals import new_backend, sent_together

_dist: Any = dist  # documented, and not declared to be exported

Addressed = tuple[int, torch.Tensor]  # the other rank, and a tensor to send or to receive


class TensorGroup:
    """Ranks that exchange tensors on one kind of device. Close the object at the end.

    Every rank of the group constructs the object, and makes the same calls in the same order. A
    method that begins an exchange returns works with a method ``wait()``: tensors must live until
    ``wait()`` has returned. Use the object in one thread at a time.

    Args:
        store: reached by all ranks of the group.
        name: unique among the groups of this store.
        rank: the number of this rank in the group.
        size: the number of ranks in the group.
        timeout: of each call.
        device_type: "cpu" for gloo, which connects all ranks now and blocks; any other for the
            backend of torch: NCCL for "cuda", which connects ranks in the first call.
        address: of this host, on which gloo listens; None: the choice of torch.

    Raises:
        RuntimeError: ranks could not be connected.
        ValueError: torch has no backend for this kind of device.
    """

    def __init__(
        self,
        store: Any,
        name: str,
        rank: int,
        size: int,
        timeout: timedelta,
        device_type: str = "cpu",
        address: str | None = None,
    ) -> None:
        self._device_type = device_type
        store = _dist.PrefixStore(name, store)
        self._backend = new_backend(device_type, store, rank, size, timeout, address)

    def close(self, *, is_broken: bool = False) -> None:
        """Leave the group. Blocks for a moment; a call in another thread may raise.

        Args:
            is_broken: a rank is lost: calls that wait for that rank are aborted.
        """
        backend, self._backend = self._backend, None
        if backend is not None and self._device_type != "cpu":  # gloo ends with its last reference
            if is_broken:  # shutdown would wait for calls that never end
                backend.abort()
            else:
                backend.shutdown()

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Copy the values of a tensor from rank ``source`` to all ranks. Blocks."""
        options = _dist.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        self._backend.broadcast([tensor], options).wait()

    def begin_gather(self, own: torch.Tensor, into: Sequence[torch.Tensor]) -> list[Any]:
        """Begin to copy the tensor of each rank to all ranks: tensors of one shape, by rank."""
        return [self._backend.allgather([[*into]], [own])]

    def begin_sum(self, parts: Sequence[torch.Tensor], own: torch.Tensor) -> list[Any]:
        """Begin to add one part for each rank over all ranks; ``own`` receives this rank's sum."""
        return [self._backend.reduce_scatter([own], [[*parts]])]

    def begin_swap(self, sends: Sequence[Addressed], takes: Sequence[Addressed]) -> list[Any]:
        """Begin to send tensors and to receive tensors, as far as they are on the group's devices.

        Empty tensors do not travel. Between two ranks tensors are received in the order in which
        they are sent.
        """
        backend = self._backend
        calls = [
            (call, [tensor], rank)
            for call, tensors in ((backend.send, sends), (backend.recv, takes))
            for rank, tensor in tensors
            if tensor.numel() and tensor.device.type == self._device_type
        ]
        return sent_together(backend, calls) if calls else []
