"""Late notes: what other ranks note after their last sum, which rank 0 asks for at the end.

Notes travel with a step's sum. What comes after it (shards that an optimizer's closure computes
again, a spot check) goes with that of the next step, and after the last one there is none.
"""

from __future__ import annotations

from quorate.engines.collective.rank_control import RankControl
from quorate.replica.notes import Note, Notes

NOTES = "notes"  # the kind of a record: all ranks call ``gathered``


def ask(ranks: RankControl, notes: Notes) -> None:
    """Take in what the other ranks note, to be said and kept. Rank 0 calls it. Blocks."""
    ranks.tell({"kind": NOTES})
    for rank, found in enumerate(gathered(ranks, [])):
        for note in found:
            notes.put(note, f"rank {rank}")


def gathered(ranks: RankControl, own: list[Note]) -> list[list[Note]]:
    """Return what each rank gives. All ranks call it. Blocks."""
    return [[Note(*note) for note in notes] for notes in ranks.gather(own)]
