"""Ownership: the shards and slices of vectors of each rank, and the sums of each host.

A rank owns at most one whole subtree of the tree of shards (``tree.py``). So a rank hands over one
sum, for any number of shards: on N ranks (N-1)/N of a vector each, as in a ring. Runs of equal
length would cost more where V is no multiple of N: of 8 shards on 3 ranks, five sums, not three.

Vectors are cut into buckets, exchanged in order, and each bucket among the ranks: every rank takes
part in every exchange. All cuts are between blocks of a fixed size. A sum over a
vector, such as a norm, is first taken over each block, and so does not depend on the cuts.

Messages inside a host are cheap, messages between hosts are not. A host with all shards of a
subtree adds them up, and a single vector leaves the host. Workers of a place have neighboring
ranks, and so neighboring shards: with a shard per worker and a power of two of workers on each
host, all sums but the last log2(hosts) are made on hosts.

Legend: V shards of a step, N ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Hashable, Iterable, Mapping, Sequence

from quorate.coordination.tree import Node, TreeSum, leaves, subtrees

BLOCK = 1 << 16  # elements: 256 KB of float32
_MESSAGE = 4  # blocks that one rank sends another at a time, at most: 1 MB of float32
_BUCKETS = 8  # at least, where each rank still has a block of each


def buckets(size: int, blocks: int) -> list[range]:
    """Return the buckets of a vector, each of ``blocks`` blocks; the last may be shorter."""
    span = BLOCK * max(1, blocks)
    return [range(start, min(size, start + span)) for start in range(0, size, span)]


def blocks_of_bucket(size: int, ranks: int, most: int) -> int:
    """Return the number of blocks of a bucket, for parts sent from host to host.

    A vector dominated by a large layer should travel while backward computes the rest. And two long
    messages on a shared connection, in opposite directions, take up to twice the time of short
    messages: see docs/several-machines.md.

    Args:
        most: blocks, of any bucket.
    """
    blocks = -(-size // BLOCK)
    return min(most, ranks * min(_MESSAGE, max(1, blocks // (_BUCKETS * ranks))))


def slices(bucket: range, ranks: int, turn: int = 0) -> list[range]:
    """Return the slice of a bucket owned by each rank: whole blocks, but for a vector's last.

    Args:
        turn: number of the bucket. Where blocks are no multiple of ranks, the surplus moves on.
    """
    blocks = -(-len(bucket) // BLOCK)
    ends = [bucket[: BLOCK * (blocks * (n + 1) // ranks)].stop for n in range(ranks)]
    cut = [range(start, end) for start, end in zip([bucket.start, *ends], ends, strict=False)]
    return [cut[(rank + turn) % ranks] for rank in range(ranks)]


def together(shard: int, among: Container[int], shards: int) -> range:
    """Return the shards of the largest subtree around a shard with all shards in ``among``.

    Args:
        among: shards, including ``shard``.
        shards: V.
    """
    node: Node = (0, shard)
    while len(leaves(node, shards)) < shards:
        level, index = node
        if not all(other in among for other in leaves((level, index ^ 1), shards)):
            break
        node = (level + 1, index >> 1)
    return leaves(node, shards)


def merged(nodes: Iterable[Node], shards: int) -> list[Node]:
    """Return the largest subtrees that nodes make up; the subtrees cover each shard once."""
    tree: TreeSum[bool] = TreeSum(shards, lambda _, __: True)
    for node in nodes:
        tree.put(node, True)
    return sorted(tree.parts)


def vectors(held: Mapping[int, Hashable], shards: int) -> int:
    """Return how many vectors leave the hosts after all additions within hosts.

    Args:
        held: the host of the result of each shard.
        shards: V.
    """
    by_host: defaultdict[Hashable, list[Node]] = defaultdict(list)
    for shard, host in held.items():
        by_host[host].append((0, shard))
    return sum(len(merged(each, shards)) for each in by_host.values())


class Hosts:
    """The ranks by host.

    Args:
        names: the host of each rank.
    """

    def __init__(self, names: Sequence[str]) -> None:
        known = list(dict.fromkeys(names))
        self.of = [known.index(name) for name in names]
        self.ranks = [
            [r for r, of in enumerate(self.of) if of == host] for host in range(len(known))
        ]

    def deal(self, shards: int) -> list[Node | None]:
        """Return the node of the tree owned by each rank; None: the rank has no shard.

        The nodes cover each shard once. The nodes of a host make up a subtree, unless this would
        give the busiest rank more shards.
        """
        everybody = [rank for own in self.ranks for rank in own]
        flat = dict(zip(everybody, subtrees(shards, len(everybody)), strict=False))
        by_host: dict[int, Node] = {}
        nodes = sorted(
            subtrees(shards, len(self.ranks)), key=lambda n: (-len(leaves(n, shards)), n)
        )
        for own, node in zip(sorted(self.ranks, key=len, reverse=True), nodes, strict=False):
            by_host |= zip(own, subtrees(shards, len(own), node), strict=False)
        is_even = most([*by_host.values()], shards) <= most([*flat.values()], shards)
        dealt = by_host if is_even else flat
        return [dealt.get(rank) for rank in range(len(everybody))]

    def sums(self, dealt: Sequence[Node | None], host: int, shards: int) -> list[Node]:
        """Return the nodes of a host's sums after all additions within the host."""
        nodes = [dealt[rank] for rank in self.ranks[host]]
        return merged([node for node in nodes if node is not None], shards)

    def hand(self, host: int, rank: int) -> int:
        """Return the rank on a host in charge of a rank: on the rank's own host, the rank itself.

        The rank in charge adds up the host's sums for the rank, and receives the rank's messages.
        """
        if self.of[rank] == host:
            return rank
        mates = self.ranks[host]
        return mates[self.ranks[self.of[rank]].index(rank) % len(mates)]


def most(dealt: Sequence[Node | None], shards: int) -> int:
    """Return how many shards the busiest rank has."""
    return max(len(leaves(node, shards)) for node in dealt if node is not None)


def slowest_factor(dealt: Sequence[Node | None], shards: int) -> float:
    """Return the number of shards of the busiest rank, relative to an even distribution."""
    return most(dealt, shards) / -(-shards // len(dealt))
