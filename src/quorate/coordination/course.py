"""The course of a run: where in it the steps of a plan are. Pure integers."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Course:
    """What is known of the run that a plan belongs to.

    Args:
        last_step: updates that it has in the end; 0: nobody has said.
        stands_at: step and epoch of the run, where all of the plan lies between two updates of it,
            as an evaluation does.
        asked: what of it code of this process has asked for: "progress".
    """

    last_step: int = 0
    stands_at: tuple[int, int] | None = None
    asked: set[str] = field(default_factory=set, compare=False)

    def progress(self, step: int) -> float:
        """Return how much of the run is done before update ``step``, from 0 to 1."""
        self.asked.add("progress")
        return min(1.0, step / self.last_step) if self.last_step else 0.0

    def to_json(self) -> list[int]:
        """Return what ``from_json`` takes."""
        return [self.last_step, *(self.stands_at or ())]

    @staticmethod
    def from_json(sent: list[int]) -> Course:
        """Return the course that ``to_json`` described."""
        last_step, *stands_at = sent
        return Course(last_step, (stands_at[0], stands_at[1]) if stands_at else None)
