"""Epochs, rounds of phases, and the course of a run: where the steps of a plan are. Pure integers.

A training of several models repeats a round of phases: d, d, g, d, d, g, ... Each update has one
phase. A round begins with a new batch, and an epoch with a new round: the rest of a round at the
end of an epoch's batches is not made. So phase and batch follow from the number of the update.

Legend: D rows of an epoch, B rows of a batch, V shards; P updates and K batches of a round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

SHORT, DROP, JOIN = "short", "drop", "join"
LAST = (SHORT, DROP, JOIN)  # what becomes of the rows of an epoch that fill no batch


def batches_per_epoch(rows: int, batch_size: int, last: str = SHORT) -> int:
    """Return how many batches an epoch has.

    Args:
        rows: D, at least B.
        batch_size: B, at least 1.
        last: "short": the remaining rows are a batch of their own; "drop": they are in no batch;
            "join": they are in the batch before.
    """
    return -(-rows // batch_size) if last == SHORT else rows // batch_size


def batch_bounds(batch: int, rows: int, batch_size: int, last: str = SHORT) -> tuple[int, int]:
    """Return the begin and end of a batch in the order of an epoch; arguments as above."""
    start = batch * batch_size
    if last == JOIN and batch == rows // batch_size - 1:
        return start, rows
    return start, min(start + batch_size, rows)


def steps_per_epoch(
    rows: int, batch_size: int, shards: int, *, by_shard: bool, last: str = SHORT
) -> int:
    """Return the number of steps of an epoch: batches, or all of their shards.

    A batch of fewer rows than V has a shard per row.

    Args:
        rows: D, at least B.
        batch_size: B, at least V.
        shards: V, at least 1.
        by_shard: whether each shard is a separate step.
        last: see ``batches_per_epoch``.
    """
    batches = batches_per_epoch(rows, batch_size, last)
    if not by_shard:
        return batches
    start, stop = batch_bounds(batches - 1, rows, batch_size, last)
    return (batches - 1) * shards + min(shards, stop - start)


@dataclass(frozen=True)
class Round:
    """The updates of a round, in their order.

    Args:
        phases: the name of the phase of each, (P,).
        takes: the number of each update's batch within the round, (P,): from 0, never falling, and
            without gaps.
    """

    phases: tuple[str, ...]
    takes: tuple[int, ...]

    @property
    def batches(self) -> int:
        """B, how many batches a round takes."""
        return self.takes[-1] + 1

    def updates(self, batches: int, phase: str | None = None) -> int:
        """Return how many updates an epoch of so many batches has.

        Args:
            phase: count the updates of this phase alone.
        """
        rounds, rest = divmod(batches, self.batches)
        ours = [
            take
            for name, take in zip(self.phases, self.takes, strict=True)
            if phase in (None, name)
        ]
        return rounds * len(ours) + sum(take < rest for take in ours)

    def at(self, update: int) -> tuple[str, int]:
        """Return phase and batch of an update of an epoch, both by their numbers from 0."""
        round_number, place = divmod(update, len(self.phases))
        return self.phases[place], round_number * self.batches + self.takes[place]

    def to_json(self) -> dict[str, list[Any]]:
        """Return the fields as in a checkpoint."""
        return {"phases": list(self.phases), "takes": list(self.takes)}


def takes_of(phases: Sequence[str], new_batch: Sequence[bool | None]) -> tuple[int, ...]:
    """Return the number of each update's batch within the round.

    Args:
        phases: the name of each, (P,).
        new_batch: whether the update takes the next batch, (P,). None: only if the phase has had
            the batch of the update before already: a phase sees each batch once.
    """
    takes: list[int] = []
    had: set[str] = set()  # phases that had the batch of the update before
    for name, is_new in zip(phases, new_batch, strict=True):
        is_new = name in had if is_new is None else is_new
        if is_new:
            had = set()
        takes.append(takes[-1] + is_new if takes else 0)
        had.add(name)
    return tuple(takes)


@dataclass(frozen=True)
class Course:
    """The extent of the run around a plan, for the position that user code reads (``At``).

    Args:
        last_step: number of updates at the end of the run; 0: unknown.
        stands_at: step and epoch of the run during an evaluation, whose own steps are batches of
            the evaluated dataset; None during training.
        asked: the values used by code of this process: "progress".
    """

    last_step: int = 0
    stands_at: tuple[int, int] | None = None
    asked: set[str] = field(default_factory=set, compare=False)

    def progress(self, step: int) -> float:
        """Return how much of the run is done before update ``step``, from 0 to 1."""
        self.asked.add("progress")
        return min(1.0, step / self.last_step) if self.last_step else 0.0
