"""Small messages among ranks of several hosts, by gloo."""

from __future__ import annotations

import torch

from quorate.engines.collective.tensor_group import TensorGroup

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
        message = own or b""
        head = _tensor(_with_length(message))
        self._group.broadcast(head, 0)
        size, found = _parsed(head)
        if size > _SMALL:
            rest = _tensor(message[_SMALL:].ljust(size - _SMALL))
            self._group.broadcast(rest, 0)
            found += rest.numpy().tobytes()
        return found

    def gather(self, own: bytes) -> list[bytes]:
        """Return the messages that all ranks pass, by rank. Blocks."""
        heads = [_parsed(head) for head in self._gather(_with_length(own))]
        longest = max(size for size, _ in heads)
        if longest <= _SMALL:
            return [found for _, found in heads]
        rests = self._gather(own[_SMALL:].ljust(longest - _SMALL))
        return [
            (found + rest.numpy().tobytes())[:size]
            for (size, found), rest in zip(heads, rests, strict=True)
        ]

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
