"""Ownership: which shards and which stretches of the vectors each rank of a collective has.

A rank owns at most one whole subtree of the tree of shards. So it hands over one sum, whatever the
number of its shards: on N ranks (N-1)/N of a vector each, as in a ring. Runs of equal length would
cost more where V is no multiple of N: of 8 shards on 3 ranks, five sums in the place of three.

Vectors are cut into buckets, which are exchanged one after the other, and each bucket among the
ranks, so that in every exchange each of them has its part. All cuts are between blocks of one fixed
size. What is summed over a vector, a norm, is summed over each block first, so that it does not
depend on where vectors are cut.
"""

from __future__ import annotations

from quorate.coordination.tree import Node

BLOCK = 1 << 16  # elements: 256 KB of float32
_MESSAGE = 4  # blocks that one rank sends another at a time, at most: 1 MB of float32
_BUCKETS = 8  # at least, where each rank still has a block of each


def subtrees(shards: int, ranks: int, below: Node | None = None) -> list[Node]:
    """Return the nodes that ranks own, in order, covering each shard once.

    The node with the most shards is halved, the leftmost of several, until there is one for each
    rank, or each is a shard. Ranks beyond that own none.

    Args:
        below: the node whose shards they are. Default: all.
    """
    root: Node = below or ((shards - 1).bit_length(), 0)
    nodes = [root]
    while len(nodes) < min(len(leaves(root, shards)), ranks):
        place = max(range(len(nodes)), key=lambda n: (len(leaves(nodes[n], shards)), -n))
        nodes[place : place + 1] = _halves(nodes[place], shards)
    return nodes


def leaves(node: Node, shards: int) -> range:
    """Return the shards below a node."""
    level, index = node
    return range(index << level, min((index + 1) << level, shards))


def buckets(size: int, blocks: int) -> list[range]:
    """Return the buckets of a vector: so many blocks each, but for the last one."""
    span = BLOCK * max(1, blocks)
    return [range(start, min(size, start + span)) for start in range(0, size, span)]


def blocks_of_bucket(size: int, ranks: int, most: int) -> int:
    """Return how many blocks a bucket of a vector has, where its parts go from host to host.

    Vectors of which a large layer is the most are to be on their way while backward makes the rest.
    And two long messages that share one connection, one each way, take up to twice the time of
    short ones: see docs/several-machines.md.

    Args:
        most: blocks, of any bucket.
    """
    blocks = -(-size // BLOCK)
    return min(most, ranks * min(_MESSAGE, max(1, blocks // (_BUCKETS * ranks))))


def slices(bucket: range, ranks: int, turn: int = 0) -> list[range]:
    """Return the stretch of a bucket that each rank owns: whole blocks, but for a vector's last.

    Args:
        turn: which bucket it is. Where blocks do not come out even, others have one more each turn.
    """
    blocks = -(-len(bucket) // BLOCK)
    ends = [bucket[: BLOCK * (blocks * (n + 1) // ranks)].stop for n in range(ranks)]
    cut = [range(start, end) for start, end in zip([bucket.start, *ends], ends, strict=False)]
    return [cut[(rank + turn) % ranks] for rank in range(ranks)]


def _halves(node: Node, shards: int) -> list[Node]:
    level, index = node
    left, right = (level - 1, 2 * index), (level - 1, 2 * index + 1)
    return [left, right] if leaves(right, shards) else _halves(left, shards)
