"""The limits of a training loop: epochs, updates, seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quorate.settings import Settings, at_least, between, declare

if TYPE_CHECKING:
    from quorate.coordination.plan import Plan


@dataclass(frozen=True, kw_only=True)
class StopAfter(Settings):
    """The arguments of ``Trainer.fit`` that decide when training ends; see ``Trainer.fit``."""

    epochs: int = declare(1, "passes over the dataset", check=at_least(1))
    steps: int | None = declare(None, "total number of updates", check=at_least(1))
    max_time_s: float | None = declare(
        None, "save and stop after this many seconds of training", kind=float, check=between(0)
    )

    def last_step(self, plan: Plan) -> int:
        """Return the number of updates at the end of training."""
        return self.epochs * plan.steps_per_epoch if self.steps is None else self.steps
