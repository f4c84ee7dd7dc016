"""Shared memory of the ranks of a host: a rank reads gradients and parameters in place."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from quorate.engines.collective import foreign_descriptors
from quorate.engines.collective.rank_control import RankControl
from quorate.errors import UserError
from quorate.machine.shared_memory import Segment
from quorate.replica.flat import Flat

GRADIENTS, PARAMETERS = 0, 1  # vectors that ranks of a host read from each other


class HostMemory:
    """Vectors of the ranks of this host. All ranks of all hosts construct the object. Blocks.

    Args:
        own: vectors of this rank, for all ranks of the host to read: gradients, and parameters with
            the same values on all ranks. All vectors have the same layout.
        by_owners: whether the owners of slices alone write parameters. If ranks of this host share
            memory, all of them use the parameters of the first rank from now on.
    """

    def __init__(self, ranks: RankControl, own: Sequence[Flat], *, by_owners: bool) -> None:
        self._rank, self._own = ranks.rank, own
        segments = [flat.segment for flat in own if flat.segment is not None]
        can_share = len(segments) == len(own) and ranks.device.type == "cpu" and ranks.has_pipes
        offered = [foreign_descriptors.offer(segment.fd) for segment in segments]
        offers = ranks.gather(offered if can_share else None)
        self.host = ranks.hosts.of[ranks.rank]
        self.ranks = ranks.hosts.ranks[self.host]
        mapped = {rank: _mapped(offers[rank], own) for rank in self.ranks if rank != ranks.rank}
        self._mapped = {rank: flats for rank, flats in mapped.items() if flats is not None}
        agreed = ranks.gather([can_share and len(self._mapped) == len(mapped), by_owners])
        # False: ranks of this host send each other what would be read.
        self.shares = all(agreed[rank][0] for rank in self.ranks)
        # Whether parameters exist once on this host.
        self.has_one_copy = self.shares and all(agreed[rank][1] for rank in self.ranks)
        if self.has_one_copy:
            self._make_one(own[PARAMETERS])
        # By rank of this host: the ranks whose slices the rank receives or sends; the rank itself,
        # and ranks of other hosts.
        self.targets = {
            rank: [r for r in range(ranks.size) if ranks.hosts.hand(self.host, r) == rank]
            for rank in self.ranks
        }

    def _make_one(self, own: Flat) -> None:
        """Map the parameters of this host's first rank at the addresses of this rank's."""
        if (lead := self._mapped.get(self.ranks[0])) is not None:
            mine, theirs = own.segment, lead[PARAMETERS].segment
            assert mine is not None
            assert theirs is not None
            mine.become(theirs)
        for flats in self._mapped.values():
            flats[PARAMETERS] = own  # the parameters of other ranks are gone

    def of(self, rank: int, which: int) -> Flat:
        """Return the vectors ``own[which]`` of a rank of this host."""
        return self._own[which] if rank == self._rank else self._mapped[rank][which]


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
