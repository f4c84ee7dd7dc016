"""Host sums: which results the workers of one host add up before anything leaves it.

The order of a sum is fixed by the tree of shards (``tree.py``). So a host can only add what makes
up a whole subtree, and for that subtree one vector leaves it in the place of one for each shard.
What makes up none with others leaves it alone: to add it up with nothing would save no message.
The tree of sums is so the tree of hosts: as workers of one place have neighbouring ranks, and so
neighbouring shards, with a shard per worker and a power of two of them on each host all sums but
the last log2(hosts) are made on hosts.

All of it is pure: the Ray transport asks ``together`` for what it has under way on a host, and
`quorate plan` counts with ``vectors`` what a step sends. ``Hosts`` in ``hosts.py`` is for ranks of
a collective, which own subtrees from the beginning and agree on them.

Legend: V shards of a step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Hashable, Iterable, Mapping

from quorate.coordination.ownership import leaves
from quorate.coordination.tree import Node, TreeSum


def together(shard: int, among: Container[int], shards: int) -> range:
    """Return the shards of the largest subtree that is wholly among some, and has this one.

    Args:
        among: these; the shard is one of them.
        shards: V.
    """
    node: Node = (0, shard)
    while len(leaves(node, shards)) < shards:
        level, index = node
        if not all(other in among for other in leaves((level, index ^ 1), shards)):
            break
        node = (level + 1, index >> 1)
    return leaves(node, shards)


def whole_subtrees(among: Iterable[int], shards: int) -> list[Node]:
    """Return the largest subtrees that are wholly among some shards; they cover each once."""
    tree: TreeSum[bool] = TreeSum(shards, lambda _, __: True)
    for shard in among:
        tree.put((0, shard), True)
    return sorted(tree.parts)


def vectors(held: Mapping[int, Hashable], shards: int) -> int:
    """Return how many vectors leave the hosts, each of which adds up what it can.

    Args:
        held: by shard: the host of whoever holds its result.
        shards: V.
    """
    by_host: defaultdict[Hashable, list[int]] = defaultdict(list)
    for shard, host in held.items():
        by_host[host].append(shard)
    return sum(len(whole_subtrees(each, shards)) for each in by_host.values())
