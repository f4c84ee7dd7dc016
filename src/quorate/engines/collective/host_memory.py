"""Shared memory of the ranks of a host: a rank reads gradients and parameters in place."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from typing import Any

from quorate.engines.collective import foreign_descriptors
from quorate.engines.collective.rank_control import RankControl
from quorate.errors import UserError
from quorate.machine.shared_memory import Segment
from quorate.replica.flat import Flat


class HostMemory:
    """Vectors of the ranks of this host. All ranks of all hosts construct the object. Blocks.

    Args:
        own: vectors of this rank, for all ranks of the host to read; all have the same layout.
        one: positions in ``own`` of vectors with the same values on all ranks, written by the
            owners of slices alone. If ranks of this host share memory, all of them use the vectors
            of the first rank from now on.
    """

    def __init__(self, ranks: RankControl, own: Sequence[Flat], one: Collection[int] = ()) -> None:
        self._ranks, self._own = ranks, own
        segments = [flat.segment for flat in own if flat.segment is not None]
        can_share = len(segments) == len(own) and ranks.device.type == "cpu" and ranks.has_pipes
        offered = [foreign_descriptors.offer(segment.fd) for segment in segments]
        offers = ranks.gather(offered if can_share else None)
        self.hosts = ranks.hosts
        self.host = self.hosts.of[ranks.rank]
        self.ranks = self.hosts.ranks[self.host]
        mapped = {rank: _mapped(offers[rank], own) for rank in self.ranks if rank != ranks.rank}
        self._mapped = {rank: flats for rank, flats in mapped.items() if flats is not None}
        agreed = ranks.gather([can_share and len(self._mapped) == len(mapped), *one])
        # False: ranks of this host send each other what would be read.
        self.shares = all(agreed[rank][0] for rank in self.ranks)
        # Positions of vectors that exist once on this host.
        self.are_one = {
            which
            for which in range(len(own))
            if self.shares and all(which in agreed[rank][1:] for rank in self.ranks)
        }
        for which in self.are_one:
            self._make_one(which)
        # By rank of this host: the ranks whose slices the rank receives or sends; the rank itself,
        # and ranks of other hosts.
        self.targets = {
            rank: [r for r in range(ranks.size) if self.hosts.hand(self.host, r) == rank]
            for rank in self.ranks
        }

    def _make_one(self, which: int) -> None:
        """Map the vectors of this host's first rank at the addresses of this rank's vectors."""
        first, own = self.ranks[0], self._own[which]
        if (lead := self._mapped.get(first)) is not None:
            mine, theirs = own.segment, lead[which].segment
            assert mine is not None
            assert theirs is not None
            mine.become(theirs)
        for flats in self._mapped.values():
            flats[which] = own  # the vectors of other ranks are gone

    def of(self, rank: int, which: int) -> Flat:
        """Return the vectors ``own[which]`` of a rank of this host."""
        return self._own[which] if rank == self._ranks.rank else self._mapped[rank][which]


def _mapped(offers: list[Any] | None, like: Sequence[Flat]) -> list[Flat] | None:
    """Return the vectors offered by a rank of this host; None if they cannot be mapped."""
    if offers is None:
        return None
    found: list[Flat] = []
    for offered, flat in zip(offers, like, strict=True):
        fd = foreign_descriptors.opened(offered, os.O_RDWR)
        if fd is None:
            return None
        try:
            found.append(flat.layout.over(Segment(max(1, flat.layout.nbytes), fd)))
        except (UserError, ValueError):  # smaller than expected
            return None
    return found
