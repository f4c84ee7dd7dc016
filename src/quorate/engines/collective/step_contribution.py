"""What a rank hands over of a step beside its gradient: small, and the same for all ranks to see.

Floats come back as they were.
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
    """What one rank handed over: nothing, the sum of its subtree, or what was raised there."""

    node: Node | None = None
    sum: ShardSum | None = None  # without its gradient
    error: BaseException | None = None
    stop: str | None = None  # why this rank was asked to end
    is_finite: bool = True  # whether this rank's slices of the gradient are
    sends_again: bool = False  # whether what it has sent was not what it had in the end
    notes: Sequence[Note] = ()  # that are new on this rank, if it is another than rank 0
    spans: Batch | None = None  # what it was at, of a run that is traced


def to_message(handed: StepContribution) -> Message:
    """Return what ``from_message`` takes, in another process."""
    message = handed._asdict()
    if (total := handed.sum) is None:
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
    """Return what a rank handed over.

    Args:
        written: how what forward wrote lies, see ``writes.layout``.
    """
    handed = StepContribution(**message)
    handed = handed._replace(notes=[Note(*note) for note in handed.notes])
    if handed.node is None:
        return handed
    total = message["sum"]
    missing, vectors = total["missing"], total["written"]
    total |= {
        "missing": None if missing is None else frozenset(missing),
        "shares": [Share(*share) for share in total["shares"]],
        "totals": unpacked_totals(total["totals"]),
        "written": Flat(written, vectors) if vectors else None,
    }
    level, index = handed.node
    return handed._replace(node=(level, index), sum=ShardSum(**total))


def exchange_contributions(
    ranks: RankControl,
    own: StepContribution,
    written: Layout,
    hear: Callable[[int, StepContribution], None],
) -> tuple[list[Part], list[StepContribution]]:
    """Return the sums of all ranks, and all that they handed over. All ranks call it. Blocks.

    Args:
        own: what this rank hands over.
        written: see ``from_message``.
        hear: told what each rank handed over, in the order of ranks.

    Raises:
        Whatever was raised on the lowest rank that raised, on all ranks.
    """
    handed = [from_message(each, written) for each in ranks.gather(to_message(own))]
    for rank, each in enumerate(handed):
        hear(rank, each)
    for each in handed:
        if each.error is not None:
            raise each.error
    parts: list[Part] = []
    for each in handed:
        if each.sum is not None:
            assert each.node is not None
            parts.append((each.node, each.sum))
    return parts, handed
