"""The contribution of a rank to a step besides its gradient: small, and sent to all ranks.

Floats arrive bit by bit as they were sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from quorate.coordination.tree import Node
from quorate.engines.collective.rank_control import RankControl
from quorate.engines.tracing import Batch
from quorate.replica.flat import Flat, Layout
from quorate.replica.notes import Note
from quorate.replica.shard_sum import ShardSum


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
