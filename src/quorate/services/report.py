"""The report of an update, for a loop of one's own, callbacks, the display and metrics.jsonl."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass  # not frozen: that takes 4 us of each update
class Report:
    """An update. All metrics are of all shards of its batch: weighted means, finished totals."""

    global_step: int  #: updates applied, this one included
    epoch: int  #: from 0, by the number of updates
    rows: int  #: that the update was made of
    dropped_rows: int  #: of its batch, which came too late
    weight: float  #: in all; rows, unless the loss function says otherwise
    metrics: dict[str, float]  #: "loss" first; of a phase, "d/loss"
    worker_losses: dict[int, tuple[float, float]]  #: per worker, weighted sum and weight
    staleness: int  #: updates between the parameters of its oldest gradient and itself
    fresh: list[int]  #: shards so far of each worker, applied to what they were computed from
    stale: list[int]  #: likewise, applied when that had changed
    dropped: list[int]  #: likewise, too late for their update
    not_finite: int  #: updates so far that were skipped for that; they count as steps
    lr: float  #: the learning rate of the first group of parameters
    grad_norm: float | None  #: before clipping; None without clip_norm
    examples_per_s: float  #: over the last few seconds, rows
    last_step: int  #: updates at the end of the run
    epochs: int  #: passes over the rows at the end of the run
    ends_epoch: bool  #: whether it is the last update of its epoch
    eta_s: float | None  #: seconds to the end at the present speed
    #: new reasons why the bits may not be those of another number of workers
    doubts: list[str] = field(default_factory=list)
    totals: dict[str, torch.Tensor] = field(default_factory=dict)  #: int64, for those who sum on
    phase: str | None = None  #: that the update was of, and before its metrics: "d/loss"

    @property
    def loss(self) -> float:
        """The mean loss over all shards."""
        return self.metrics["loss" if self.phase is None else f"{self.phase}/loss"]
