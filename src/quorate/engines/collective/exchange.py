"""The exchange: each rank gets its slices of the sum over all shards, and gives what they became.

Bucket by bucket: the ranks of a host add what they have along the tree of shards; what each host
has goes to the rank that owns the slice, which adds that along the tree. So there is one order,
whoever adds, and a slice crosses to another host once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch

from quorate.coordination.ownership import slowest_factor
from quorate.coordination.tree import Node, TreeSum
from quorate.engines.collective.gradient_buckets import GradientBuckets
from quorate.engines.collective.host_memory import HostMemory
from quorate.engines.collective.rank_control import MOST_UNDER_WAY, RankControl, TensorTransfer
from quorate.engines.collective.rank_slices import Bucket, RankSlices
from quorate.replica.flat import Flat, Layout

OUTBOX, PARAMETERS = 0, 1  # what ranks of a host read of each other

_Part = tuple[Node, torch.Tensor]


class GradientExchange:
    """What ranks send each other of vectors of one layout. ``open`` it before it is used.

    Args:
        ranks: all of them.
        layout: of the whole vectors.
        bucket_bytes: how much is exchanged at a time.
    """

    def __init__(self, ranks: RankControl, layout: Layout, bucket_bytes: int) -> None:
        self.ranks = ranks
        self.slices = RankSlices(ranks, layout, bucket_bytes)
        # Backward makes the gradients of the last layers first.
        self.order = [*reversed(range(len(self.slices.buckets)))]
        self._pool = _TensorPool()
        self._has_seen = False
        self.is_finite = True  # whether the last sum is, all of its slices

    def open(self, parameters: Flat, *, by_owners: bool = False) -> None:
        """Make memory for what is sent, and find that of the others. All ranks call it. Blocks.

        Args:
            parameters: the same on all ranks.
            by_owners: whether ranks write to nothing of them but to what they own, while others
                compute from them. Ranks of one host then have them once, where they can.
        """
        layout, device = self.slices.whole, self.ranks.device
        memory = layout.new(device) if parameters.segment is None else layout.shared()
        self.outbox = GradientBuckets(memory, self.slices.buckets)
        self._near = HostMemory(self.ranks, [memory, parameters], [PARAMETERS] if by_owners else [])
        self._parameters = parameters
        self._stream = None if device.type == "cpu" else torch.Stream(device)
        self._total = self.slices.layout.new(device)
        self._pieces = self.slices.pieces(self._total)  # by bucket
        self.dealt = cache(self._near.hosts.deal)  # of V: the node that each rank owns

    @property
    def has_one_copy(self) -> bool:
        """Whether all ranks have the parameters in one and the same memory."""
        return PARAMETERS in self._near.are_one and len(self._near.ranks) == self.ranks.size

    def seen_order(self) -> list[int] | None:
        """Return the order in which this rank's buckets became whole; None if it is as known.

        All ranks are to take them in one order; rank 0 says in which, when it has made a step.
        """
        came = self.outbox.came
        if self._has_seen or len(came) < len(self.order):
            return None
        self._has_seen = True
        return [*came] if came != self.order else None

    def slowest_factor(self, shards: int) -> float:
        """Return how much longer than evenly dealt V shards take: see ``hosts``."""
        return slowest_factor(self.dealt(shards), shards)

    # --- sums -------------------------------------------------------------------------------------

    def sum(self, shards: int, *, waits: bool = True) -> Flat:
        """Return this rank's slices of the sum over a step's shards. All ranks call it. Blocks.

        Summed are the outboxes of all ranks that own shards.

        Args:
            waits: whether buckets are still coming into this rank's outbox.

        Returns:
            The sum, in memory that the next one takes.
        """
        dealt = self.dealt(shards)
        under_way: deque[_BucketSum] = deque()
        with self._beside():
            for number in self.order:
                if waits and dealt[self.ranks.rank] is not None:
                    self.outbox.wait(number)
                under_way.append(self._begin(number, dealt, shards))
                if len(under_way) > MOST_UNDER_WAY:
                    under_way.popleft().end()
            for adding in under_way:
                adding.end()
        return self._total

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Within the block a GPU works beside whatever computes gradients, which goes on."""
        if self._stream is None:
            yield
            return
        computes = torch.accelerator.current_stream(self.ranks.device)
        # What this stream sends may still be on its way into the outbox by the other one, and what
        # it writes may still be read there: events of single gradients do not cover all of that.
        self._stream.wait_stream(computes)
        with self._stream:
            yield
        computes.wait_stream(self._stream)

    def _begin(self, number: int, dealt: Sequence[Node | None], shards: int) -> _BucketSum:
        """Add what this host has of a bucket, and send it to those that own it."""
        bucket, hosts = self.slices.buckets[number], self._near.hosts
        own, me = self._near.host, self.ranks.rank
        adding = _BucketSum(self._pieces[number], shards, self._pool)
        sends: list[tuple[int, torch.Tensor]] = []
        parts = self._near_parts(bucket, dealt, adding)
        adding.take(parts.pop(me))
        for target, theirs in parts.items():
            sends += [(target, part) for _, part in adding.added(theirs)]
        takes: list[tuple[int, torch.Tensor]] = []
        for host in range(len(hosts.ranks)):
            if host != own:
                coming = [(n, adding.new()) for n in hosts.sums(dealt, host, shards)]
                takes += [(hosts.hand(host, me), part) for _, part in coming]
                adding.coming += coming
        adding.swap = self.ranks.begin_swap(sends, takes)
        return adding

    def _near_parts(
        self, bucket: Bucket, dealt: Sequence[Node | None], adding: _BucketSum
    ) -> dict[int, list[_Part]]:
        """Return what the ranks of this host have for each rank that this one deals with."""
        near, me = self._near, self.ranks.rank
        owners = [(rank, node) for rank in near.ranks if (node := dealt[rank]) is not None]
        targets = near.targets[me]
        if near.shares:
            near.arrive()
            of = {rank: near.of(rank, OUTBOX) for rank, _ in owners}
            return {
                target: [(node, bucket.part(of[rank], target)) for rank, node in owners]
                for target in targets
            }
        parts: dict[int, list[_Part]] = {target: [] for target in targets}
        sends: list[tuple[int, torch.Tensor]] = []
        takes: list[tuple[int, torch.Tensor]] = []
        for rank, node in owners:
            for target in targets:
                part = bucket.part(self.outbox, target)
                if rank != me:
                    part = adding.new(part)
                    takes.append((rank, part))
                parts[target].append((node, part))
        if dealt[me] is not None:
            sends = [
                (rank, bucket.part(self.outbox, target))
                for rank in near.ranks
                if rank != me
                for target in near.targets[rank]
            ]
        self.ranks.swap(sends, takes)
        return parts

    # --- what became of them ----------------------------------------------------------------------

    def spread(self, whole: Flat) -> None:
        """Have all ranks get the slices that each has in its own whole vectors. Blocks.

        Args:
            whole: the parameters, or others of their layout.
        """
        near, hosts, ranks = self._near, self._near.hosts, self.ranks
        others = [host for host in range(len(hosts.ranks)) if host != near.host]
        parts = self.slices.stretches
        ranks.swap(
            [
                (hosts.hand(h, ranks.rank), part)
                for h in others
                for part in parts(whole, ranks.rank)
            ],
            [
                (rank, part)
                for rank in near.targets[ranks.rank]
                if rank != ranks.rank
                for part in parts(whole, rank)
            ],
        )
        if len(near.ranks) == 1:
            return
        if not near.shares:
            here = [rank for rank in near.ranks if rank != ranks.rank]
            ranks.swap(
                [(r, p) for r in here for t in near.targets[ranks.rank] for p in parts(whole, t)],
                [(r, p) for r in here for t in near.targets[r] for p in parts(whole, t)],
            )
            return
        which = PARAMETERS if whole is self._parameters else OUTBOX
        if which == OUTBOX:
            for target in near.targets[ranks.rank]:
                _copy(parts(whole, target), parts(self.outbox, target))
        near.arrive()
        if which in near.are_one:
            return
        for rank in near.ranks:
            if rank != ranks.rank:
                for target in near.targets[rank]:
                    _copy(parts(near.of(rank, which), target), parts(whole, target))
        if which == OUTBOX:  # which the next step writes, and parameters only when all have summed
            near.arrive()


def _copy(sources: Iterable[torch.Tensor], targets: Iterable[torch.Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


class _BucketSum:
    """The sum of one bucket's slice, while it comes about.

    Args:
        into: where it goes.
    """

    swap: TensorTransfer

    def __init__(self, into: torch.Tensor, shards: int, pool: _TensorPool) -> None:
        self._into, self._shards, self._pool = into, shards, pool
        self._own: list[torch.Tensor] = []  # memory from the pool
        self._writable: set[int] = set()
        self._is_taken = False  # whether ``into`` has a part of the sum
        self._parts: list[_Part] = []
        self.coming: list[_Part] = []

    def new(self, like: torch.Tensor | None = None) -> torch.Tensor:
        """Return memory like that of the slice, or of another tensor, until ``end``."""
        tensor = self._pool.take(self._into if like is None else like)
        self._own.append(tensor)
        self._writable.add(id(tensor))
        return tensor

    def take(self, parts: Iterable[_Part]) -> None:
        """Take what this host has."""
        self._parts = self.added(parts, into_slice=True)

    def added(self, parts: Iterable[_Part], *, into_slice: bool = False) -> list[_Part]:
        """Return parts of which those are added that are next to each other in the tree."""

        def add(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            if id(left) in self._writable:
                out = left
            elif id(right) in self._writable:
                out = right
            elif into_slice and not self._is_taken:
                out, self._is_taken = self._into, True
                self._writable.add(id(out))
            else:
                out = self.new(left)
            return torch.add(left, right, out=out)

        tree = TreeSum(self._shards, add)
        for node, part in parts:
            tree.put(node, part)
        return sorted(tree.parts.items(), key=lambda item: item[0])

    def end(self) -> None:
        """Take what other hosts have sent. Blocks until it is here."""
        self.swap.wait()
        ((_, total),) = self.added([*self._parts, *self.coming], into_slice=True)
        if total is not self._into:
            self._into.copy_(total)
        self._pool.give(self._own)


class _TensorPool:
    """Memory that is used again: pages that are new to a process cost more than a copy."""

    def __init__(self) -> None:
        self._free: dict[tuple[torch.dtype, int], list[torch.Tensor]] = {}

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """Return a vector like another one, with any values."""
        free = self._free.get((like.dtype, like.numel()))
        return free.pop() if free else torch.empty_like(like)

    def give(self, tensors: Iterable[torch.Tensor]) -> None:
        """Take vectors back."""
        for tensor in tensors:
            self._free.setdefault((tensor.dtype, tensor.numel()), []).append(tensor)
