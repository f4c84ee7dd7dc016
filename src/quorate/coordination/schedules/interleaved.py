"""Interleaved 1F1B: several stages ("chunks") per device, so that the pipeline fills sooner.

Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
SC 2021 (2104.04473), section 2.2. Device r of p has stages r, r + p, r + 2p, ...: v chunks, each a
v-th of what it would have else. The bubble is a v-th of 1F1B's, for v times the transfers and more
activations held: a device is up to (v - 1) g + 2 (p - 1) chunks ahead.

Shards go in groups of g: a device computes a group's shards in its first chunk, the same shards
in its second, and so on, then the next group; backwards likewise, from the last chunk on. The
paper wants m to be a multiple of p = g. Here m is any number: there are as many groups of at
least p as m gives, of sizes that differ by one at most, the larger ones first. Larger ones first
because of the last device: in its steady part, backward k of a group of g_j needs the forward
that lies v - 1 times g_j further on, and what it is ahead is v - 1 times the first group's size.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from quorate.coordination.schedules import one_forward_one_backward
from quorate.coordination.schedules.action import Action, Row, Rows, Work, sizes


def schedule(stages: int, shards: int, *, devices: int | None = None) -> Rows:
    """Return the rows: stage s is on device s mod p. As many devices as stages: 1F1B.

    With one chunk there is nothing to interleave, and the 2 (p - 1) forwards ahead would hold
    twice the activations for the same bubble.
    """
    devices = sizes("interleaved", stages, shards, devices)
    if devices == stages:
        return one_forward_one_backward.schedule(stages, shards)
    groups = _groups(shards, devices)
    return tuple(_row(range(r, stages, devices), groups, devices - 1 - r) for r in range(devices))


def _groups(shards: int, devices: int) -> list[range]:
    """Return the groups of shards, the larger ones first."""
    count = max(shards // devices, 1)
    size, more = divmod(shards, count)
    starts = [j * size + min(j, more) for j in range(count + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


def _row(chunks: Sequence[int], groups: list[range], behind: int) -> Row:
    """Return the row of a device.

    Args:
        chunks: its stages, (v,).
        groups: of the shards.
        behind: how many devices come after it.
    """
    forwards = _in_groups(Work.FORWARD, chunks, groups)
    backwards = _in_groups(Work.BACKWARD, chunks[::-1], groups)
    ahead = min((len(chunks) - 1) * len(groups[0]) + 2 * behind, len(forwards))
    row = forwards[:ahead]
    for turn, backward in enumerate(backwards, start=ahead):
        row += [*forwards[turn : turn + 1], backward]
    return tuple(row)


def _in_groups(work: Work, chunks: Sequence[int], groups: list[range]) -> list[Action]:
    return [Action(work, stage, shard) for group in groups for stage in chunks for shard in group]
