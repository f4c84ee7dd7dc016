"""Late notes: notes of ranks after their last sum, collected by rank 0 at the end of a loop.

Notes travel with the sum of a step. Notes made after a sum (in shards computed again for an
optimizer's closure, or in a spot check) travel with the sum of the next step, and the last step has
no next step.
"""

from __future__ import annotations

from quorate.engines.collective.rank_control import RankControl
from quorate.replica.notes import Note, Notes

NOTES = "notes"  # kind of the record after which all ranks call ``gathered``


def ask(ranks: RankControl, notes: Notes) -> None:
    """Collect the notes of all ranks, to be shown and saved. Rank 0 alone calls. Blocks."""
    ranks.tell({"kind": NOTES})
    for rank, found in enumerate(gathered(ranks, [])):
        for note in found:
            notes.put(note, f"rank {rank}")


def gathered(ranks: RankControl, own: list[Note]) -> list[list[Note]]:
    """Return the notes passed by all ranks, by rank. All ranks call. Blocks."""
    return [[Note(*note) for note in notes] for notes in ranks.gather(own)]
