"""Reports: what one update was, for a loop of one's own, the display and metrics.jsonl."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Report:
    """One update. All metrics are of all shards of its batch: weighted means, finished totals."""

    global_step: int  #: updates applied, this one included
    epoch: int  #: from 0, by the number of updates
    rows: int  #: that the update was made of
    dropped_rows: int  #: of its batch, which came too late
    weight: float  #: total weight: rows, unless the loss function says otherwise
    metrics: dict[str, float]  #: "loss" first
    worker_losses: dict[int, tuple[float, float]]  #: per worker: weighted sum of the loss, weight
    staleness: int  #: updates between the parameters of its oldest gradient and itself
    fresh: list[int]  #: so far, per worker: shards applied to what they were computed from
    stale: list[int]  #: likewise: shards applied when that had changed
    dropped: list[int]  #: likewise: shards that came too late for their update
    not_finite: int  #: updates so far that were skipped for that; they count as steps
    lr: float  #: the learning rate of the first group of parameters
    grad_norm: float | None  #: before clipping; None without clip_norm
    examples_per_s: float  #: over the last few seconds, rows
    last_step: int  #: updates at the end of the run
    epochs: int  #: passes over the rows at the end of the run
    ends_epoch: bool  #: whether it is the last update of its epoch
    eta_s: float | None  #: seconds to the end at the present speed
    totals: dict[str, torch.Tensor] = field(default_factory=dict)  #: int64, for those who sum on

    @property
    def loss(self) -> float:
        """The mean loss over all shards."""
        return self.metrics["loss"]


class MetricsLog:
    """``metrics.jsonl``: one JSON object per update and per evaluation.

    Lines of steps after ``global_step``, which a run that was cut off may have left, are dropped:
    those steps are computed again.
    """

    def __init__(self, run_dir: Path, global_step: int) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._path = run_dir / "metrics.jsonl"
        if self._path.exists():
            self._drop_after(global_step)
        self._file = self._path.open("a", encoding="utf-8", buffering=1)  # a kill loses no line

    def update(self, report: Report) -> None:
        record = dict(vars(report))
        for name in ("totals", "worker_losses", "last_step", "epochs", "ends_epoch", "eta_s"):
            del record[name]
        metrics = record.pop("metrics")
        self._write(record | {f"metric_{n}" if n in record else n: v for n, v in metrics.items()})

    def evaluation(self, global_step: int, metrics: dict[str, float]) -> None:
        self._write({"global_step": global_step, "validation": metrics})

    def _write(self, record: dict[str, Any]) -> None:
        kept = {name: value for name, value in record.items() if value is not None}
        self._file.write(json.dumps(kept) + "\n")

    def _drop_after(self, global_step: int) -> None:
        kept = []
        for line in self._path.read_text(encoding="utf-8").splitlines():
            try:
                if json.loads(line)["global_step"] <= global_step:
                    kept.append(line + "\n")
            except (ValueError, KeyError, TypeError):
                continue  # torn by a kill: its step is computed again, or was after the checkpoint
        with tempfile.NamedTemporaryFile("w", dir=self._path.parent, delete=False) as new:
            new.writelines(kept)
        os.replace(new.name, self._path)

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
