"""Parcels: batches sent through a socket, from a loader process to its parent.

The bytes of tensors and arrays are sent directly from their memory into fresh memory; the rest is a
pickle, which only ever comes from a child process of the receiver. Tensors that share memory still
share it on arrival, and all tensors keep their strides and their position modulo 64 bytes: the bits
returned by kernels may depend on both.

A parcel: the number of buffers, their sizes in bytes, then the buffers. The first buffer is a
pickle. Buffers too large for a socket's capacity come in memory without a name, whose descriptor is
sent along with the number.
"""

from __future__ import annotations

import io
import itertools
import os
import pickle
import socket
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from quorate.machine.descriptors import receive_descriptors

_NUMBER = struct.Struct("<q")
_ALIGNMENT = 64  # bytes: torch's alignment of new memory
_SMALL_BYTES = 1 << 17  # larger parcels do not go through the socket


def pack(end: socket.socket, batch: Any) -> None:
    """Send a batch, or the reason why the batch cannot be sent. Blocks until received.

    Raises:
        OSError: the other end is closed.
    """
    try:
        buffers = _pickled((batch, None))
    except Exception as error:  # user code: objects in the batch may not support pickling
        buffers = _pickled((None, in_words(error)))
    sizes = b"".join(_NUMBER.pack(buffer.nbytes) for buffer in buffers)
    memory = _filled(buffers) if sum(b.nbytes for b in buffers) > _SMALL_BYTES else None
    if memory is None:
        end.sendall(_NUMBER.pack(len(buffers)))
    else:
        try:
            socket.send_fds(end, [_NUMBER.pack(len(buffers))], [memory])
        finally:
            os.close(memory)
    end.sendall(sizes)
    for buffer in buffers if memory is None else ():
        end.sendall(buffer)


class UnsentError(Exception):
    """A batch could not be sent; the text says why."""


def unpack(end: socket.socket) -> Any:
    """Return the next batch. Blocks.

    Raises:
        UnsentError: the batch could not be sent.
        EOFError, OSError: the other end is closed.
        UserError: this process has no free descriptor for the received memory.
        RuntimeError: the received memory cannot be mapped.
    """
    number, fds = receive_descriptors(end, _NUMBER.size, 1)
    memory = fds[0] if fds else None
    try:
        (count,) = _NUMBER.unpack(bytes(number) + bytes(_received(end, _NUMBER.size - len(number))))
        sizes = np.frombuffer(_received(end, _NUMBER.size * count), dtype="<q").tolist()
        if memory is None:
            data, *buffers = [_received(end, size) for size in sizes]
        else:
            data, *buffers = _mapped(memory, sizes)
    finally:
        if memory is not None:
            os.close(memory)
    try:
        batch, problem = pickle.loads(data, buffers=buffers)
    except Exception as error:  # user code: classes in the batch rebuild their objects
        raise UnsentError(in_words(error)) from error
    if problem is not None:
        raise UnsentError(problem)
    return batch


def in_words(error: Exception) -> str:
    """Return the type of an error, and the first line of the text."""
    text = str(error).partition("\n")[0][:200]
    return f"{type(error).__name__}: {text}"


def _filled(buffers: list[memoryview]) -> int | None:
    """Return the descriptor of nameless memory with the buffers; None if unavailable."""
    if not os.path.exists("/proc/self/fd"):  # noqa: PTH110  the receiver maps by this path
        return None
    try:
        memory = os.memfd_create("quorate-rows", os.MFD_CLOEXEC)
    except (AttributeError, OSError):  # another system; too many files
        return None
    try:
        at = 0
        for buffer in buffers:
            written = 0
            while written < buffer.nbytes:
                written += os.pwrite(memory, buffer[written:], at + written)
            at += _up(buffer.nbytes)
        os.ftruncate(memory, at)
    except OSError:  # a limit on the size of files, which applies to a memfd
        os.close(memory)
        return None
    return memory


def _mapped(memory: int, sizes: list[int]) -> list[memoryview]:
    """Return the buffers in received memory. The mapping outlives the descriptor."""
    name, nbytes = f"/proc/self/fd/{memory}", sum(_up(size) for size in sizes)
    whole = torch.from_file(name, shared=True, size=nbytes, dtype=torch.uint8).numpy().data
    ends = [*itertools.accumulate(_up(size) for size in sizes)]
    return [whole[end - _up(size) :][:size] for size, end in zip(sizes, ends, strict=True)]


def _up(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _received(end: socket.socket, nbytes: int) -> memoryview:
    # torch's memory is aligned, unlike a bytearray's.
    memory = torch.empty(nbytes, dtype=torch.uint8).numpy().data
    got = 0
    while got < nbytes:
        now = end.recv_into(memory[got:])
        if not now:
            raise EOFError
        got += now
    return memory


def _pickled(value: Any) -> list[memoryview]:
    """Return a pickle, and the buffers outside of the pickle."""
    stream, buffers = io.BytesIO(), list[memoryview]()

    def keep(buffer: pickle.PickleBuffer) -> bool:
        try:
            view = buffer.raw()
        except BufferError:  # an array that is not contiguous
            return True  # copy into the pickle
        buffers.append(view)
        return False

    _ParcelPickler(stream, keep).dump(value)
    return [stream.getbuffer(), *buffers]


class _ParcelPickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, keep: Callable[[pickle.PickleBuffer], Any]) -> None:
        super().__init__(stream, protocol=5, buffer_callback=keep)
        # By address and extent: the pickle refers to the same object for shared memory.
        self._memories: dict[tuple[int, int, int], _StoragePart] = {}

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.requires_grad and not value.is_leaf:
            raise pickle.PicklingError("a tensor that was computed from others, with a gradient")
        # All other tensors (subclasses, sparse, quantized) are pickled by value.
        if (
            type(value) is not torch.Tensor
            or value.layout is not torch.strided
            or value.device.type != "cpu"
            or value.is_quantized
            or value.is_conj()
            or value.is_neg()
            or value.__dict__
        ):
            return NotImplemented
        storage, size = value.untyped_storage(), value.element_size()
        first = int(value.storage_offset()) * size
        spans = [(n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True)]
        last = first + (int(sum(spans)) + 1) * size if value.numel() else first
        start, stop = 0, int(storage.nbytes())
        if stop > 4 * (last - first):  # a few rows of a large dataset
            start, stop = first // _ALIGNMENT * _ALIGNMENT, last
        key = (storage.data_ptr(), start, stop)
        if key not in self._memories:
            self._memories[key] = _StoragePart(storage, start, stop)
        lies = (value.dtype, (first - start) // size, tuple(value.shape), value.stride())
        return _tensor, (self._memories[key], *lies, value.requires_grad)


class _StoragePart:
    """A part of a storage, with the methods for pickling."""

    def __init__(self, storage: torch.UntypedStorage, start: int, stop: int) -> None:
        view = torch.empty(0, dtype=torch.uint8).set_(storage, start, (stop - start,), (1,))
        self._bytes = view.numpy().data

    def __reduce_ex__(self, _protocol: Any) -> Any:
        return _memory, (pickle.PickleBuffer(self._bytes),)


def _memory(buffer: Any) -> torch.Tensor:
    if memoryview(buffer).nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(buffer, dtype=torch.uint8)


def _tensor(
    memory: torch.Tensor,
    dtype: torch.dtype,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
) -> torch.Tensor:
    tensor = torch.empty(0, dtype=dtype).set_(memory.untyped_storage(), offset, shape, stride)
    return tensor.requires_grad_(requires_grad)
