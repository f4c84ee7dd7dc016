"""Rounds: which phase each update of an epoch is, and which batch it takes. Pure integers.

A training of several models goes round its phases: d, d, g, d, d, g, ... Each update is of one
phase. A round begins with a new batch, and each epoch with a new round: what is left of a round
where an epoch's batches end is not made. So all of it follows from the number of the update.

Legend: P updates of a round, B batches of a round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Round:
    """The updates of a round, in their order.

    Args:
        phases: the name of the phase of each, (P,).
        takes: which of the round's batches each takes, (P,): from 0, never falling, and none left
            out.
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
            phase: count those of this one alone.
        """
        rounds, rest = divmod(batches, self.batches)
        ours = [
            take for name, take in zip(self.phases, self.takes, strict=True) if _is(name, phase)
        ]
        return rounds * len(ours) + sum(take < rest for take in ours)

    def at(self, update: int) -> tuple[str, int]:
        """Return phase and batch of an update of an epoch, both by their numbers from 0."""
        round_number, place = divmod(update, len(self.phases))
        return self.phases[place], round_number * self.batches + self.takes[place]

    def to_json(self) -> dict[str, Any]:
        """Return what ``from_json`` takes."""
        return {"phases": list(self.phases), "takes": list(self.takes)}

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> Round:
        """Return the round that ``to_json`` described."""
        return cls(tuple(told["phases"]), tuple(told["takes"]))


def _is(name: str, phase: str | None) -> bool:
    return phase is None or name == phase


def takes_of(phases: Sequence[str], new_batch: Sequence[bool | None]) -> tuple[int, ...]:
    """Return which of a round's batches each update takes.

    Args:
        phases: the name of each, (P,).
        new_batch: whether it takes the next batch, (P,). None: only if its phase has had the one
            of the update before already, so that a phase sees each batch once.
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
