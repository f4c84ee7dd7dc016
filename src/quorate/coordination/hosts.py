"""Hosts: which ranks are on one machine, and what that means for shards and for messages.

Between ranks of one host everything is cheap, between hosts it is not. So a host gets shards that
are one whole subtree of the tree of shards, if nobody has to wait longer for that: its ranks then
add what they have, and one sum leaves the host in the place of one for each rank.
"""

from __future__ import annotations

from collections.abc import Sequence

from quorate.coordination.ownership import leaves, subtrees
from quorate.coordination.tree import Node, TreeSum


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
        """Return the node of the tree that each rank owns; None: it has no shard.

        Each shard is below one of them. A host's nodes make up one, as far as that costs no time.
        """
        ranks = [rank for own in self.ranks for rank in own]
        flat: list[Node | None] = [None] * len(ranks)
        for rank, node in zip(ranks, subtrees(shards, len(ranks)), strict=False):
            flat[rank] = node
        by_host: list[Node | None] = [None] * len(ranks)
        nodes = sorted(
            subtrees(shards, len(self.ranks)), key=lambda n: (-len(leaves(n, shards)), n)
        )
        for own, node in zip(sorted(self.ranks, key=len, reverse=True), nodes, strict=False):
            for rank, part in zip(own, subtrees(shards, len(own), node), strict=False):
                by_host[rank] = part
        return by_host if most(by_host, shards) <= most(flat, shards) else flat

    def sums(self, dealt: Sequence[Node | None], host: int, shards: int) -> list[Node]:
        """Return the nodes whose sums a host has when its ranks have added what they can."""
        tree: TreeSum[bool] = TreeSum(shards, lambda _, __: True)
        for rank in self.ranks[host]:
            if (node := dealt[rank]) is not None:
                tree.put(node, True)
        return sorted(tree.parts)

    def hand(self, host: int, rank: int) -> int:
        """Return who on a host deals with a rank: itself on its own, else one that others spare.

        It adds up what the rank is to get from that host, and takes what the rank sends there.
        """
        if self.of[rank] == host:
            return rank
        mates = self.ranks[host]
        return mates[self.ranks[self.of[rank]].index(rank) % len(mates)]


def most(dealt: Sequence[Node | None], shards: int) -> int:
    """Return how many shards the busiest rank has."""
    return max(len(leaves(node, shards)) for node in dealt if node is not None)


def slowest_factor(dealt: Sequence[Node | None], shards: int) -> float:
    """Return how many shards the busiest rank has, over what it had if all had equally many."""
    return most(dealt, shards) / -(-shards // len(dealt))
