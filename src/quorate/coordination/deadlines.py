"""Deadlines: whether the other open steps can still be applied in time, if one is applied now.

A step of version v may be applied while at most v + K updates are made. The open steps can all be,
if they can in the order of their versions (earliest deadline first: Jackson, 1955), the i-th of
them, from 0, after i others. So what has to be known is the least of v - i, over all steps but one.

It is kept in a binary tree whose leaves are the steps in the order of their versions. A node has
how many steps are below it, and the least v - i of these, i counted within the node; where two are
put together, those on the right come after those on the left. So a change costs O(log n) for n
steps, and so does an answer. A step gets its version when it is dealt, and then nobody has a newer
one: it goes to the end. When no leaf is left there, all are set anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

_LEAST = 8  # leaves


class Deadlines:
    """The versions of open steps, by their numbers. A version is how many updates it is from."""

    def __init__(self) -> None:
        self._set(())

    def put(self, number: int, version: int) -> None:
        """Note the version of a step, which may have had another."""
        if self._versions.get(number) == version:
            return
        self.drop(number)
        if self._next == len(self._least) or version < self._newest:
            self._set([*self._versions.items(), (number, version)])
        else:
            self._append(number, version)

    def drop(self, number: int) -> None:
        """Forget a step, if it is here."""
        if self._versions.pop(number, None) is not None:
            self._change(self._leaves.pop(number), 0, inf)

    def least_without(self, number: int) -> float:
        """Return the least v - i of the steps without one; infinite: there are no others."""
        node = self._leaves.get(number)
        if node is None:
            return self._least[1]
        count, least = 0, inf  # of what is below the node, without the one
        while node > 1:
            other, is_right = node ^ 1, node & 1
            if is_right:
                least = min(self._least[other], least - self._counts[other])
            else:
                least = min(least, self._least[other] - count)
            count += self._counts[other]
            node >>= 1
        return least

    def _set(self, versions: Iterable[tuple[int, int]]) -> None:
        """Begin anew, with as many leaves again as are taken."""
        ordered = sorted(versions, key=lambda number_and_version: number_and_version[1])
        leaves = max(_LEAST, 1 << (2 * len(ordered)).bit_length())
        free = leaves - len(ordered)
        # Node n has nodes 2 n and 2 n + 1 below it; there is no node 0.
        self._counts = [0] * leaves + [1] * len(ordered) + [0] * free
        self._least: list[float] = [inf] * leaves + [v for _, v in ordered] + [inf] * free
        # By number: its node, its version.
        self._leaves = {number: leaves + place for place, (number, _) in enumerate(ordered)}
        self._versions = dict(ordered)
        self._next = leaves + len(ordered)  # the first leaf that is free
        self._newest = ordered[-1][1] if ordered else 0  # the version before it
        for node in range(leaves - 1, 0, -1):
            self._put_together(node)

    def _append(self, number: int, version: int) -> None:
        self._versions[number], self._leaves[number] = version, self._next
        self._change(self._next, 1, version)
        self._next, self._newest = self._next + 1, version

    def _change(self, node: int, count: int, least: float) -> None:
        self._counts[node], self._least[node] = count, least
        while node > 1:
            node >>= 1
            self._put_together(node)

    def _put_together(self, node: int) -> None:
        """Set a node from the two below it."""
        counts, leasts, left = self._counts, self._least, 2 * node
        before, least = counts[left], leasts[left]
        counts[node] = before + counts[left + 1]
        least_after = leasts[left + 1] - before
        leasts[node] = least if least <= least_after else least_after
