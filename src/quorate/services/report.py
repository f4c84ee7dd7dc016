"""The report of an update, for training loops, callbacks, the display and metrics.jsonl."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass  # not frozen: a frozen dataclass takes 4 us of each update
class Report:
    """Results of one update: metrics over all shards of the update, counts, speed.

    Metrics are weighted means over the shards, or finished totals.
    """

    global_step: int  #: updates applied so far, including this update
    epoch: int  #: from 0, by the number of updates
    rows: int  #: number of rows in the update
    dropped_rows: int  #: rows of the batch that are in no update
    weight: float  #: total weight; the rows, unless the loss returns weights
    metrics: dict[str, float]  #: by name, "loss" first; "d/loss" in phase "d"
    worker_losses: dict[int, tuple[float, float]]  #: by worker: sum and weight
    staleness: int  #: updates since the parameters of the oldest gradient in the update
    fresh: list[int]  #: shards per worker so far, applied to unchanged parameters
    stale: list[int]  #: shards per worker so far, applied to changed parameters
    dropped: list[int]  #: shards per worker so far, too late for the update
    not_finite: int  #: updates so far, skipped as not finite; also steps
    lr: float  #: learning rate of the first parameter group
    grad_norm: float | None  #: norm of the gradient before clipping; None without clip_norm
    examples_per_s: float  #: rows per second, over the last few seconds
    last_step: int  #: number of updates at the end of the run
    epochs: int  #: number of passes over the rows at the end of the run
    ends_epoch: bool  #: whether the update is the last of the epoch
    eta_s: float | None  #: seconds to the end of the run at the current speed
    #: new reasons why the bits may differ on another number of workers
    doubts: list[str] = field(default_factory=list)
    totals: dict[str, torch.Tensor] = field(default_factory=dict)  #: raw int64 sums, by name
    phase: str | None = None  #: phase of the update, and prefix of its metrics
    #: learning rate of each optimizer, if an update has several; see ``lr``
    lrs: list[float] = field(default_factory=list)
    #: by name, total weights of metrics and terms of the loss that have weights of their own
    weights: dict[str, float] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        """The mean loss over all shards of the update."""
        return self.metrics["loss" if self.phase is None else f"{self.phase}/loss"]
