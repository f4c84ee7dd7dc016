"""The network of ranks: addresses and sockets of gloo, groups for tensors, and small messages.

By default gloo listens on the address of the host's name, which is 127.0.1.1 on many machines. A
thread waits in gloo for a silent rank for ever, unless the connection ends. If this process shuts a
connection down, gloo behaves as if the silent rank had closed the connection, and raises.

``torch.distributed.init_process_group`` would make a default group, and a script that was written
for DDP would find the group: ``is_initialized()`` would be true within the loss, which would then
divide by the number of ranks, or wait for a rank that has no shard. So a group is made from a store
directly, and ``torch.distributed`` knows no group.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from quorate.replica.torch_internals import new_backend, sent_together

LOOPBACK = "127.0.0.1"


def own_address(endpoint: tuple[str, int] | None) -> str:
    """Return the address of this host on the way to the store; loopback if the store is local."""
    return LOOPBACK if endpoint is None else towards(*endpoint) or LOOPBACK


def listening_address(endpoint: tuple[str, int] | None, own: str, others: Sequence[str]) -> str:
    """Return the address on which gloo of this rank listens.

    Args:
        endpoint: host and port of the store; None if the ranks meet through a file.
        own: the address of this host on the way to the store, see ``own_address``.
        others: the same address of each rank's host.
    """
    # On the host of the store ``own`` is often a loopback address, which other hosts cannot reach:
    # take the address on the way to a rank of another host.
    far = next((address for address in others if not is_loopback(address)), None)
    if endpoint is not None and far is not None and is_loopback(own):
        return towards(far, endpoint[1]) or LOOPBACK
    return own


def towards(host: str, port: int) -> str | None:
    """Return the address of this host on the way to another host; None if no route exists.

    Nothing is sent.
    """
    with suppress(OSError):  # an unknown name
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_DGRAM
        ):
            # If a family of addresses has no route, try the next address.
            with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                name: str = probe.getsockname()[0]
                return LOOPBACK if is_loopback(name) else name
    return None


def is_loopback(address: str) -> bool:
    """Return whether an address reaches nothing but this host."""
    with suppress(ValueError):
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    return False


OpenSocket = tuple[int, str]  # the descriptor, and the system's name of the socket


def open_sockets() -> set[OpenSocket]:
    """Return all open sockets of this process; none without /proc."""
    found = set()
    with suppress(OSError):
        for entry in list(Path("/proc/self/fd").iterdir()):
            with suppress(OSError):  # closed meanwhile
                name = str(entry.readlink())
                if name.startswith("socket:"):
                    found.add((int(entry.name), name))
    return found


def shut_down(sockets: Set[OpenSocket]) -> None:
    """Shut sockets down for good: threads that wait in gloo raise. Any thread calls."""
    for fd, _ in sockets & open_sockets():  # the descriptors of closed sockets may be reused
        with suppress(OSError), socket.socket(fileno=os.dup(fd)) as link:
            # If a listening socket is shut down, gloo ends the process.
            if not link.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                link.shutdown(socket.SHUT_RDWR)


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


_HEAD = 8  # bytes: the length of a message
_SMALL = 1024  # bytes of a message that travel with the length


class GlooMessages:
    """Messages among all ranks of a group. Use the object in one thread.

    Args:
        group: of ranks, for nothing but these messages.
        size: the number of ranks.
    """

    def __init__(self, group: TensorGroup, size: int) -> None:
        self._group, self._size = group, size

    def spread(self, own: bytes | None) -> bytes:
        """Return the message of rank 0. Every rank calls. Blocks.

        Args:
            own: the message, on rank 0; None on all others.
        """
        return self._moved(own or b"", self._broadcast)[0]

    def gather(self, own: bytes) -> list[bytes]:
        """Return the messages that all ranks pass, by rank. Blocks."""
        return self._moved(own, self._gather)

    def _moved(self, own: bytes, move: Callable[[bytes], list[torch.Tensor]]) -> list[bytes]:
        """Return received messages: a move of the length and the beginning, and one of the rest."""
        heads = [_parsed(head) for head in move(_with_length(own))]
        longest = max(size for size, _ in heads)
        if longest <= _SMALL:
            return [found for _, found in heads]
        rests = move(own[_SMALL:].ljust(longest - _SMALL))
        return [
            (found + rest.numpy().tobytes())[:size]
            for (size, found), rest in zip(heads, rests, strict=True)
        ]

    def _broadcast(self, own: bytes) -> list[torch.Tensor]:
        moved = _tensor(own)
        self._group.broadcast(moved, 0)
        return [moved]

    def _gather(self, own: bytes) -> list[torch.Tensor]:
        taken = [torch.empty(len(own), dtype=torch.uint8) for _ in range(self._size)]
        (work,) = self._group.begin_gather(_tensor(own), taken)
        work.wait()
        return taken


def _with_length(message: bytes) -> bytes:
    return (len(message).to_bytes(_HEAD, "little") + message[:_SMALL]).ljust(_HEAD + _SMALL)


def _parsed(head: torch.Tensor) -> tuple[int, bytes]:
    """Return the length of a message, and the bytes of the message behind the length."""
    text = head.numpy().tobytes()
    size = int.from_bytes(text[:_HEAD], "little")
    return size, text[_HEAD : _HEAD + size]


def _tensor(message: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)
