"""The contribution of a rank to a step besides its gradient: small, and sent to all ranks.

Floats arrive bit by bit as they were sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from quorate.coordination.tree import Node
from quorate.engines.collective.rank_control import RankControl
from quorate.engines.messages import Message
from quorate.engines.tracing import Batch
from quorate.replica.flat import Flat, Layout
from quorate.replica.notes import Note
from quorate.replica.shard_sum import Part, ShardSum, Share
from quorate.replica.totals import packed_totals, unpacked_totals


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


def to_message(contribution: StepContribution) -> Message:
    """Return a message from which ``from_message`` rebuilds the contribution elsewhere."""
    message = contribution._asdict()
    if (total := contribution.sum) is None:
        return message
    written = None if total.written is None else total.written.vectors
    message["sum"] = {
        "weight": total.weight,
        "metrics": total.metrics,
        "buffers": total.buffers,
        "integer_buffers": total.integer_buffers,
        "missing": None if total.missing is None else sorted(total.missing),
        "shares": total.shares,
        "totals": packed_totals(total.totals),
        "written": written,
    }
    return message


def from_message(message: Message, written: Layout) -> StepContribution:
    """Return the contribution of another rank.

    Args:
        message: as ``to_message`` returned it.
        written: the layout of parameters that forward wrote, see ``writes.layout``.
    """
    contribution = StepContribution(**message)
    contribution = contribution._replace(notes=[Note(*note) for note in contribution.notes])
    if contribution.node is None:
        return contribution
    total = message["sum"]
    missing, vectors = total["missing"], total["written"]
    total |= {
        "missing": None if missing is None else frozenset(missing),
        "shares": [Share(*share) for share in total["shares"]],
        "totals": unpacked_totals(total["totals"]),
        "written": Flat(written, vectors) if vectors else None,
    }
    level, index = contribution.node
    return contribution._replace(node=(level, index), sum=ShardSum(**total))


def exchange_contributions(
    ranks: RankControl,
    own: StepContribution,
    written: Layout,
    hear: Callable[[int, StepContribution], None],
) -> tuple[list[Part], list[StepContribution]]:
    """Return the sums of all ranks, and all contributions by rank. All ranks call. Blocks.

    Args:
        own: the contribution of this rank.
        written: see ``from_message``.
        hear: called with the number and the contribution of each rank, in order.

    Raises:
        Exception: the error of the lowest rank with an error; the same on all ranks.
    """
    gathered = ranks.gather(to_message(own))
    contributions = [from_message(each, written) for each in gathered]
    for rank, each in enumerate(contributions):
        hear(rank, each)
    parts: list[Part] = []
    for each in contributions:
        if each.error is not None:
            raise each.error
        if each.sum is not None:
            assert each.node is not None
            parts.append((each.node, each.sum))
    return parts, contributions
