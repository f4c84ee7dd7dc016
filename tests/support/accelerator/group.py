"""``simccl``: NCCL's substitute for the simulated devices; a backend of ``torch.distributed``.

A call returns at once. The call runs on a stream of the communicator, after all earlier work of the
caller's stream; ``wait()`` makes a stream wait for the call, and not the host. If calls of ranks do
not fit together, and so would hang or take wrong bytes, all ranks raise, with the calls of two
ranks. After the loss of a rank, ranks waiting for the lost rank wait until ``abort()``.
"""

import atexit
import zlib
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

NAME = "simccl"
_dist: Any = dist
_LONGEST = 900  # text of a call, as told to another rank
_DTYPES = {  # as NCCL
    *(torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
}

_Sent = tuple[int, torch.Tensor]  # a rank, and a tensor to send there or to receive from there


def register() -> None:
    """Register the backend with torch.distributed."""
    _dist.Backend.register_backend(NAME, Communicator, extended_api=True, devices=["sim"])


class Work:
    """A call under way. Its tensors are kept until a stream waits for the call."""

    def __init__(self, stream: torch.Stream, tensors: Sequence[torch.Tensor]) -> None:
        self._event, self._tensors = stream.record_event(), [*tensors]
        self._device = stream.device

    def wait(self) -> bool:
        """Have the current stream wait."""
        torch.accelerator.current_stream(self._device).wait_event(self._event)
        self._tensors.clear()
        return True

    def is_completed(self) -> bool:
        return bool(self._event.query())


class Communicator:
    """The ranks of a group, with a device each."""

    supports_coalescing = True

    def __init__(self, options: Any, _: object) -> None:
        self._rank, self._size = options.group_rank, options.group_size
        store = _dist.PrefixStore(NAME, options.store)
        self._gloo = _dist.ProcessGroupGloo(store, self._rank, self._size, timeout=options.timeout)
        group = _dist.ProcessGroup(store, self._rank, self._size)
        group._register_backend(torch.device("cpu"), group.BackendType.GLOO, self._gloo)
        self._group = group.boxed()
        self._others = [rank for rank in range(self._size) if rank != self._rank]
        self._stream: torch.Stream | None = None
        self._together: tuple[list[_Sent], list[_Sent]] | None = None  # between the two calls
        atexit.register(self.abort)  # the end of a process ends kernels

    # --- calls ------------------------------------------------------------------------------------

    def allgather(self, into: list[list[torch.Tensor]], own: list[torch.Tensor]) -> Work:
        (taken,), (given,) = into, own
        _require([*taken, given], [given] * (1 + self._size))
        with self._on_stream([*taken, given]) as stream:
            self._run(
                f"calls allgather of {_text(given)}",
                [(rank, given) for rank in self._others],
                [(rank, taken[rank]) for rank in self._others],
            )
            if taken[self._rank].data_ptr() != given.data_ptr():
                taken[self._rank].copy_(given)
        return Work(stream, [*taken, given])

    def reduce_scatter(self, own: list[torch.Tensor], parts: list[list[torch.Tensor]]) -> Work:
        (total,), (given,) = own, parts
        _require(given, [total] * self._size)
        with self._on_stream([total, *given]) as stream:
            found = [torch.empty_like(total) for _ in range(self._size)]
            found[self._rank].copy_(given[self._rank])
            self._run(
                f"calls reduce_scatter to {_text(total)}",
                [(rank, given[rank]) for rank in self._others],
                [(rank, found[rank]) for rank in self._others],
            )
            for each in found[1:]:
                found[0].add_(each)
            total.copy_(found[0])
        return Work(stream, [total, *given])

    def send(self, tensors: list[torch.Tensor], rank: int, _tag: int) -> Work | None:
        return self._between([(rank, tensor) for tensor in tensors], [])

    def recv(self, tensors: list[torch.Tensor], rank: int, _tag: int) -> Work | None:
        return self._between([], [(rank, tensor) for tensor in tensors])

    def _start_coalescing(self) -> None:
        self._together = [], []

    def _end_coalescing(self) -> Work | None:
        assert self._together is not None
        (sends, takes), self._together = self._together, None
        return self._between(sends, takes)

    def _between(self, sends: list[_Sent], takes: list[_Sent]) -> Work | None:
        if self._together is not None:
            self._together[0].extend(sends)
            self._together[1].extend(takes)
            return None
        tensors = [tensor for _, tensor in [*sends, *takes]]
        if not tensors:
            return None
        with self._on_stream(tensors) as stream:
            self._run(None, sends, takes)
        return Work(stream, tensors)

    # --- the communicator -------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Leave the group when all calls have ended. Blocks."""
        if self._stream is not None:
            self._stream.record_event().synchronize()

    def abort(self) -> None:
        """End calls held up by a lost rank."""
        torch.ops.simulated_accelerator.abort(self._group)

    def _on_stream(self, tensors: Sequence[torch.Tensor]) -> torch.Stream:
        """Return the stream to enter, after all earlier work of the caller's stream."""
        device = tensors[0].device
        for tensor in tensors:
            if tensor.device.type != "sim" or tensor.dtype not in _DTYPES or tensor.is_sparse:
                raise RuntimeError(f"{NAME} has no {tensor.dtype} on {tensor.device}")
            if tensor.device != device or not tensor.is_contiguous():
                raise RuntimeError(f"{NAME} takes contiguous tensors of one device")
        if self._stream is None:
            self._connect(device)
            self._stream = torch.Stream(device)
        if device != self._stream.device:
            raise RuntimeError(f"the communicator is of {self._stream.device}, not of {device}")
        self._stream.wait_stream(torch.accelerator.current_stream(device))
        return self._stream

    def _connect(self, device: torch.device) -> None:
        """Meet all ranks, as the first call does with NCCL. Blocks."""
        own = torch.tensor([device.index])
        all_of_them = [torch.empty_like(own) for _ in range(self._size)]
        self._gloo.allgather([all_of_them], [own]).wait()
        seen: dict[int, int] = {}
        for rank, index in enumerate(int(each) for each in all_of_them):
            if index in seen:
                ranks = f"rank {seen[index]} and rank {rank}"
                raise RuntimeError(f"Duplicate GPU detected: {ranks} both on sim:{index}")
            seen[index] = rank

    def _run(self, call: str | None, sends: Sequence[_Sent], takes: Sequence[_Sent]) -> None:
        """Run a call of all ranks; None: of the ranks that send or receive something."""
        assert self._stream is not None
        given, taken = _by_rank(sends), _by_rank(takes)
        peers = self._others if call is not None else sorted({*given, *taken})
        torch.ops.simulated_accelerator.exchange(
            self._group,
            self._stream.device.index,
            self._stream.stream_id,
            peers,
            [call or _swaps(given[rank], taken[rank]) for rank in peers],
            [call or _swaps(taken[rank], given[rank]) for rank in peers],
            [tensor for _, tensor in sends],
            [rank for rank, _ in sends],
            [tensor for _, tensor in takes],
            [rank for rank, _ in takes],
        )


def _require(tensors: Sequence[torch.Tensor], like: Sequence[torch.Tensor]) -> None:
    if list(map(_text, tensors)) != list(map(_text, like)):
        raise RuntimeError(f"{NAME} takes as many tensors as there are ranks, of one length")


def _by_rank(messages: Sequence[_Sent]) -> defaultdict[int, list[torch.Tensor]]:
    found: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
    for rank, tensor in messages:
        found[rank].append(tensor)
    return found


def _swaps(sends: Sequence[torch.Tensor], takes: Sequence[torch.Tensor]) -> str:
    given, taken = (", ".join(map(_text, each)) or "nothing" for each in (sends, takes))
    text = f"sends {given} and takes {taken}"
    return text if len(text) < _LONGEST else f"{text[:_LONGEST]}... {zlib.crc32(text.encode())}"


def _text(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}[{tensor.numel()}]"
