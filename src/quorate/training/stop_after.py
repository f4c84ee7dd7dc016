"""The limits of a training loop: epochs, updates, seconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quorate.settings import Settings, about, at_least, between

if TYPE_CHECKING:
    from quorate.coordination.plan import Plan


@dataclass(frozen=True, kw_only=True)
class StopAfter(Settings):
    """The arguments of ``Trainer.fit`` that decide when training ends; see ``Trainer.fit``."""

    epochs: int = field(default=1, metadata=about("passes over the dataset", check=at_least(1)))
    steps: int | None = field(
        default=None, metadata=about("total number of updates", check=at_least(1))
    )
    max_time_s: float | None = field(
        default=None,
        metadata=about(
            "save and stop after this many seconds of training", kind=float, check=between(0)
        ),
    )

    def last_step(self, plan: Plan) -> int:
        """Return the number of updates at the end of training."""
        return self.epochs * plan.steps_per_epoch if self.steps is None else self.steps
