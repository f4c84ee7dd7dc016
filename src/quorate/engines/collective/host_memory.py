"""Host memory: the ranks of this host. What they send and what they have is read where it is.

A rank makes its memory known by its process and descriptor: another one of the same user opens it
under /proc. So it has no name that could be left behind, and nobody else can open it.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Collection, Sequence
from typing import Any

from quorate.engines.collective.rank_control import RankControl
from quorate.errors import UserError
from quorate.machine.shared_memory import Segment
from quorate.replica.flat import Flat

KEY_BYTES = 64


class HostMemory:
    """The memory of the ranks of this host. All ranks make it together. Blocks.

    Args:
        own: of this rank, that others on its host are to read; all of one layout.
        one: which of them hold the same on all ranks, and are written where they are owned, if any:
            ranks that share memory have those of the first one among them from now on.
    """

    def __init__(self, ranks: RankControl, own: Sequence[Flat], one: Collection[int] = ()) -> None:
        self._ranks = ranks
        key = Segment(KEY_BYTES)
        text = secrets.token_hex(KEY_BYTES // 2)
        key.map[:] = text.encode()
        segments = [key, *(flat.segment for flat in own if flat.segment is not None)]
        offer = {
            "pid": os.getpid(),
            "fds": [segment.fd for segment in segments],
            "key": text,
            "can": len(segments) == 1 + len(own) and ranks.device.type == "cpu",
        }
        offers = ranks.gather(offer)
        self.hosts = ranks.hosts
        self.host = self.hosts.of[ranks.rank]
        self.ranks = self.hosts.ranks[self.host]
        mapped = {rank: _mapped(offers[rank], own) for rank in self.ranks if rank != ranks.rank}
        can = all(flats is not None for flats in mapped.values()) and offer["can"]
        agreed = ranks.gather([can, *one])
        # Whether ranks read each other's memory; if not, they send what is in it.
        self.shares = all(agreed[rank][0] for rank in self.ranks)
        # Whether those of this host have one vector together in the place of one each; by which.
        self.are_one = {
            which
            for which in range(len(own))
            if self.shares and all(which in agreed[rank][1:] for rank in self.ranks)
        }
        self._mapped = {rank: flats for rank, flats in mapped.items() if flats is not None}
        self._own = own
        for which in self.are_one:
            self._make_one(which)
        # By rank of this host: the ranks that it deals with, itself and others elsewhere.
        self.targets = {
            rank: [r for r in range(ranks.size) if self.hosts.hand(self.host, r) == rank]
            for rank in self.ranks
        }

    def _make_one(self, which: int) -> None:
        """Lay this rank's vectors over those of the first rank of this host."""
        first, own = self.ranks[0], self._own[which]
        if (lead := self._mapped.get(first)) is not None:
            mine, theirs = own.segment, lead[which].segment
            assert mine is not None
            assert theirs is not None
            mine.become(theirs)
        for flats in self._mapped.values():
            flats[which] = own  # what others had is no more

    def of(self, rank: int, which: int) -> Flat:
        """Return what a rank of this host has: its ``own[which]``."""
        return self._own[which] if rank == self._ranks.rank else self._mapped[rank][which]

    def arrive(self) -> None:
        """Return when all ranks of this host have come here. Blocks."""
        if len(self.ranks) > 1:
            self._ranks.wait_for_host()


def _mapped(offer: dict[str, Any], like: Sequence[Flat]) -> list[Flat] | None:
    """Return the memory that a rank of this host offers; None if it cannot be had."""
    if not offer["can"]:
        return None
    sizes = [KEY_BYTES, *(max(1, flat.layout.nbytes) for flat in like)]
    try:
        key, *others = [
            Segment(size, os.open(f"/proc/{offer['pid']}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC))
            for size, fd in zip(sizes, offer["fds"], strict=True)
        ]
    except (OSError, UserError, ValueError):  # there is no such process, or what it has is smaller
        return None
    if key.map[:] != offer["key"].encode():  # the process is another one
        return None
    return [flat.layout.over(segment) for flat, segment in zip(like, others, strict=True)]
