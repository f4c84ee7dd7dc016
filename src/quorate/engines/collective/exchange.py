"""The gradient exchange: each rank receives its slices of the sum over all shards.

Bucket by bucket, the ranks of a host add their sums along the tree of shards. Each host sends its
sum of a slice once to the owner of the slice, and the owner adds the sums of all hosts along the
tree. So the order of additions is the same on any number of ranks. Everything besides the gradient
is small, and sent to all ranks.

The native exchange is torch.distributed's own reduce-scatter and all-gather, bucket by bucket. Its
order of additions, and so the bits, depend on the number of ranks. The native exchange serves to
measure the cost of the ordered sum. (The reduce-scatter of gloo sends as many bytes as an
all-reduce: twice as many as necessary.)

Legend: V shards in a step; the subtree of a rank or host is a node of the tree of shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import msgspec
import torch

from quorate.coordination.tree import Node, TreeSum
from quorate.engines.collective.gradient_buckets import Bucket, GradientBuckets, buckets_of
from quorate.engines.collective.one_host import GRADIENTS, PARAMETERS, HostMemory
from quorate.engines.collective.rank_control import RankControl, in_turn
from quorate.engines.partition import Partition
from quorate.engines.tracing import Batch
from quorate.replica.flat import Flat, Layout
from quorate.replica.notes import Note
from quorate.replica.shard_sum import ShardSum

_Part = tuple[Node, torch.Tensor]


class GradientExchange:
    """The exchange of vectors of one layout among all ranks. Call ``open`` before use.

    Args:
        ranks: the connections to all ranks.
        layout: of the whole vectors.
        bucket_bytes: the size of a bucket, at most.
    """

    def __init__(self, ranks: RankControl, layout: Layout, bucket_bytes: int) -> None:
        self.ranks = ranks
        self.buckets = buckets_of(ranks, layout, bucket_bytes)
        self.partition = Partition(
            layout, [[(b.vector, b.of[rank]) for b in self.buckets] for rank in range(ranks.size)]
        )
        # Backward computes the gradients of the last layers first.
        self.order = [*reversed(range(len(self.buckets)))]
        self._pool = _TensorPool()
        self._has_seen = False
        self.is_finite = True  # whether all slices of the last sum are finite

    def open(self, parameters: Flat, *, by_owners: bool = False) -> None:
        """Make memory for gradients, and map the memory of other ranks. All ranks call. Blocks.

        Args:
            parameters: the same values on all ranks.
            by_owners: whether each rank writes only its slices of the parameters, while other
                ranks compute from the parameters. Ranks of one host then share one copy, if
                they can share memory.
        """
        layout, device = self.partition.whole, self.ranks.device
        memory = layout.new(device) if parameters.segment is None else layout.shared()
        self.gradient_buckets = GradientBuckets(memory, self.buckets)
        self._memory = HostMemory(self.ranks, [memory, parameters], by_owners=by_owners)
        self._parameters = parameters
        self._stream = None if device.type == "cpu" else torch.Stream(device)
        # A vector for each bucket, with a view for each piece of a parameter.
        self._total = self.partition.layout(self.ranks.rank).new(device)
        self.dealt = cache(self.ranks.hosts.deal)  # from V to the subtree of each rank

    @property
    def has_one_copy(self) -> bool:
        """True if all ranks share the same memory for the parameters."""
        return self._memory.has_one_copy and len(self._memory.ranks) == self.ranks.size

    def seen_order(self) -> list[int] | None:
        """Return the order in which this rank's buckets became complete, after the first step.

        All ranks must exchange buckets in one order. Rank 0 sends the order after its first step.

        Returns:
            None, if the order is known already.
        """
        came = self.gradient_buckets.came
        if self._has_seen or len(came) < len(self.order):
            return None
        self._has_seen = True
        return [*came] if came != self.order else None

    # --- sums -------------------------------------------------------------------------------------

    def sum(self, shards: int, *, waits: bool = True) -> Flat:
        """Return this rank's slices of the sum over a step's shards. All ranks call. Blocks.

        Args:
            shards: V of the step.
            waits: whether backward still computes gradients of this rank.

        Returns:
            The sum, in memory that the next call overwrites.
        """
        dealt = self.dealt(shards)
        waits = waits and dealt[self.ranks.rank] is not None

        def begun() -> Iterator[Callable[[], None]]:
            for number in self.order:
                if waits:
                    self.gradient_buckets.wait(number)
                yield self._begin(number, dealt, shards)

        with self._beside():
            in_turn(begun())
        return self._total

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Within the block a GPU runs this thread's kernels while backward continues."""
        if self._stream is None:
            yield
            return
        computes = torch.accelerator.current_stream(self.ranks.device)
        # The other stream may still write gradients that this stream sends, and may still read
        # memory that this stream writes: events of single gradients do not cover all of that.
        self._stream.wait_stream(computes)
        with self._stream:
            yield
        computes.wait_stream(self._stream)

    def _begin(self, number: int, dealt: Sequence[Node | None], shards: int) -> Callable[[], None]:
        """Add the sums of this host for a bucket, and send them to the owners of slices.

        Returns:
            A function to add the sums of all hosts. The function blocks.
        """
        bucket, hosts = self.buckets[number], self.ranks.hosts
        own, me = self._memory.host, self.ranks.rank
        bucket_sum = _BucketSum(self._total.vectors[number], shards, self._pool)
        sends: list[tuple[int, torch.Tensor]] = []
        parts = self._host_parts(bucket, dealt, bucket_sum)
        bucket_sum.take(parts.pop(me))
        for target, theirs in parts.items():
            sends += [(target, part) for _, part in bucket_sum.added(theirs)]
        takes: list[tuple[int, torch.Tensor]] = []
        for host in range(len(hosts.ranks)):
            if host != own:
                coming = [(n, bucket_sum.new()) for n in hosts.sums(dealt, host, shards)]
                takes += [(hosts.hand(host, me), part) for _, part in coming]
                bucket_sum.coming += coming
        bucket_sum.end_transfer = self.ranks.begin_swap(sends, takes)
        return bucket_sum.end

    def _host_parts(
        self, bucket: Bucket, dealt: Sequence[Node | None], bucket_sum: _BucketSum
    ) -> dict[int, list[_Part]]:
        """Return the sums of the ranks of this host, by target rank of this rank."""
        memory, me, own = self._memory, self.ranks.rank, self.gradient_buckets
        parts: dict[int, list[_Part]] = {target: [] for target in memory.targets[me]}
        takes: list[tuple[int, torch.Tensor]] = []
        for rank in memory.ranks:
            if (node := dealt[rank]) is None:
                continue
            for target, found in parts.items():
                if memory.shares:
                    part = bucket.part(memory.of(rank, GRADIENTS), target)
                else:
                    part = bucket.part(own, target)
                    if rank != me:
                        part = bucket_sum.new(part)
                        takes.append((rank, part))
                found.append((node, part))
        if memory.shares:
            self.ranks.wait_for_host()
            return parts
        here = [rank for rank in memory.ranks if rank != me and dealt[me] is not None]
        self.ranks.swap([(r, bucket.part(own, t)) for r in here for t in memory.targets[r]], takes)
        return parts

    # --- slices after the update ------------------------------------------------------------------

    def spread(self, whole: Flat) -> None:
        """Copy the slices of each rank to the whole vectors of all ranks. Blocks.

        Args:
            whole: the parameters, or other vectors of the layout.
        """
        memory, me, parts = self._memory, self.ranks.rank, self.partition.views
        hosts, own = self.ranks.hosts, memory.targets[me]
        # 1. Between hosts: each slice crosses to another host once.
        hands = [hosts.hand(host, me) for host in range(len(hosts.ranks)) if host != memory.host]
        sends = [(hand, part) for hand in hands for part in parts(whole, me)]
        takes = [(rank, part) for rank in own if rank != me for part in parts(whole, rank)]
        self.ranks.swap(sends, takes)
        # 2. Within this host.
        here = [rank for rank in memory.ranks if rank != me]
        if not here:
            return
        if not memory.shares:
            sends = [(r, part) for r in here for t in own for part in parts(whole, t)]
            takes = [(r, part) for r in here for t in memory.targets[r] for part in parts(whole, t)]
            self.ranks.swap(sends, takes)
            return
        which = PARAMETERS if whole is self._parameters else GRADIENTS
        if which == GRADIENTS:
            for target in own:
                _copy(parts(whole, target), parts(self.gradient_buckets, target))
        self.ranks.wait_for_host()
        if which == PARAMETERS and memory.has_one_copy:
            return
        for rank in here:
            for target in memory.targets[rank]:
                _copy(parts(memory.of(rank, which), target), parts(whole, target))
        if which == GRADIENTS:  # the next step writes gradients; parameters only after its sums
            self.ranks.wait_for_host()


def _copy(sources: Iterable[torch.Tensor], targets: Iterable[torch.Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


class _BucketSum:
    """The sum of this rank's slice of one bucket, while parts of the sum arrive.

    Args:
        into: memory for the sum.
        shards: V of the step.
        pool: of memory for parts.
    """

    end_transfer: Callable[[], None]  # waits for the parts of other hosts

    def __init__(self, into: torch.Tensor, shards: int, pool: _TensorPool) -> None:
        self._into, self._shards, self._pool = into, shards, pool
        self._own: list[torch.Tensor] = []  # memory from the pool
        self._writable: set[int] = set()
        self._parts: list[_Part] = []
        self.coming: list[_Part] = []

    def new(self, like: torch.Tensor | None = None) -> torch.Tensor:
        """Return memory of the shape of a tensor, by default of the slice, until ``end``."""
        tensor = self._pool.take(self._into if like is None else like)
        self._own.append(tensor)
        self._writable.add(id(tensor))
        return tensor

    def take(self, parts: Iterable[_Part]) -> None:
        """Add the parts of this host."""
        self._parts = self.added(parts, into_slice=True)

    def added(self, parts: Iterable[_Part], *, into_slice: bool = False) -> list[_Part]:
        """Add parts wherever two parts are neighbours in the tree; return the remaining parts."""

        def add(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            if id(left) in self._writable:
                out = left
            elif id(right) in self._writable:
                out = right
            elif into_slice and id(self._into) not in self._writable:  # no part of the sum yet
                out = self._into
                self._writable.add(id(out))
            else:
                out = self.new(left)
            return torch.add(left, right, out=out)

        tree = TreeSum(self._shards, add)
        for node, part in parts:
            tree.put(node, part)
        return sorted(tree.parts.items(), key=lambda item: item[0])

    def end(self) -> None:
        """Add the parts of other hosts. Blocks until the parts have arrived."""
        self.end_transfer()
        ((_, total),) = self.added([*self._parts, *self.coming], into_slice=True)
        if total is not self._into:
            self._into.copy_(total)
        self._pool.give(self._own)


class _TensorPool:
    """A pool of memory: the first write to a new page costs more than a copy."""

    def __init__(self) -> None:
        self._free: dict[tuple[torch.dtype, int], list[torch.Tensor]] = {}

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """Return a vector of the type and length of another vector, with any values."""
        free = self._free.get((like.dtype, like.numel()))
        return free.pop() if free else torch.empty_like(like)

    def give(self, tensors: Iterable[torch.Tensor]) -> None:
        """Return vectors to the pool."""
        for tensor in tensors:
            self._free.setdefault((tensor.dtype, tensor.numel()), []).append(tensor)


class NativeExchange(GradientExchange):
    """The exchange of vectors by torch.distributed."""

    def open(self, parameters: Flat, *, by_owners: bool = False) -> None:  # noqa: ARG002
        """Make memory for gradients: see ``GradientExchange``. Ranks share no parameters."""
        super().open(parameters)  # torch.distributed writes all parameters on each rank

    def sum(self, shards: int, *, waits: bool = True) -> Flat:
        """Return this rank's slices of the sum over a step's shards: see ``GradientExchange``."""
        if self.dealt(shards)[self.ranks.rank] is None:
            for vector in self.gradient_buckets.vectors:
                vector.zero_()
        return super().sum(shards, waits=waits)

    def _begin(
        self,
        number: int,
        dealt: Sequence[Node | None],  # noqa: ARG002
        shards: int,  # noqa: ARG002
    ) -> Callable[[], None]:
        bucket, ranks = self.buckets[number], range(self.ranks.size)
        parts = [bucket.part(self.gradient_buckets, rank) for rank in ranks]
        return self.ranks.begin(lambda group: group.begin_sum(parts, self._total.vectors[number]))

    def spread(self, whole: Flat) -> None:
        """Copy the slices of each rank to the whole vectors of all ranks. Blocks."""
        in_turn(self._begin_spread(bucket, whole) for bucket in self.buckets)

    def _begin_spread(self, bucket: Bucket, whole: Flat) -> Callable[[], None]:
        """Begin to spread a bucket. Returns a function to wait for the end."""
        me, ranks = self.ranks.rank, range(self.ranks.size)
        parts = [bucket.part(whole, rank) for rank in ranks]
        if all(len(part) == len(parts[0]) for part in parts):
            return self.ranks.begin(lambda group: group.begin_gather(parts[me], parts))
        # Not every backend accepts parts of several lengths.
        others = [rank for rank in ranks if rank != me]
        sends = [(rank, parts[me]) for rank in others]
        return self.ranks.begin_swap(sends, [(rank, parts[rank]) for rank in others])


class StepContribution(NamedTuple):
    """The contribution of one rank: the sum of its subtree, an error, or nothing."""

    node: Node | None = None
    sum: ShardSum | None = None  # without the gradient
    error: BaseException | None = None
    stop: str | None = None  # the signal that requested the end of this rank
    is_finite: bool = True  # whether this rank's slices of the gradient are finite
    sends_again: bool = False  # whether the gradient changed after buckets were sent
    notes: Sequence[Note] = ()  # new notes of a rank other than 0
    spans: Batch | None = None  # the activities of this rank, if the run is traced


def _packed(own: StepContribution) -> list[Any]:
    """Return a message about a contribution, with written parameters at the end."""
    if (total := own.sum) is None:
        return [own, None]
    rest = msgspec.structs.replace(total, gradient=None, represented=[], outputs=[], written=None)
    return [own._replace(sum=rest), None if total.written is None else total.written.vectors]


def _unpacked(message: Sequence[Any], layout: Layout) -> StepContribution:
    fields, written = message
    contribution = msgspec.convert(fields, StepContribution)
    if contribution.sum is not None and written:
        contribution.sum.written = Flat(layout, written)
    return contribution


def exchange_contributions(
    ranks: RankControl, own: StepContribution, written: Layout
) -> list[StepContribution]:
    """Return the contributions of all ranks, by rank. All ranks call. Blocks.

    Args:
        own: the contribution of this rank.
        written: the layout of parameters that forward wrote, see ``writes.layout``.
    """
    return [_unpacked(each, written) for each in ranks.gather(_packed(own))]
