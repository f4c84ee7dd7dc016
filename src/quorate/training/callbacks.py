"""Callbacks: what people add to ``fit``. Early stopping, images in a summary, sample text, ..."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch

from quorate.services.report import Report


class Run(Protocol):
    """What a callback has of the ``Trainer``."""

    model: torch.nn.Module

    @property
    def run_dir(self) -> Path | None: ...

    @property
    def global_step(self) -> int: ...

    @property
    def averaged_model(self) -> torch.nn.Module | None: ...

    @property
    def summaries(self) -> Any:
        """TensorBoard's ``SummaryWriter``; None without ``run_dir`` or summaries."""

    def evaluate(self, dataset: Any, *, averaged: bool | None = None) -> dict[str, float]: ...

    def stop(self, reason: str = ...) -> None: ...


class Callback:
    """Inherit from it, and define what is of interest.

    All methods are called in the thread of ``fit``, between two updates: parameters may be read
    (``trainer.model``), ``trainer.evaluate`` and ``trainer.stop`` be called. What they raise ends
    the run as any exception of the user's own code does: the state is saved.
    """

    def started(self, trainer: Run) -> None:
        """Training begins, or goes on: ``trainer.global_step`` updates are made."""

    def updated(self, report: Report) -> None:
        """An update was made."""

    def evaluated(self, global_step: int, metrics: dict[str, float]) -> None:
        """The validation set was evaluated."""

    def saved(self, global_step: int, path: Path) -> None:
        """A checkpoint of this step is on the disk."""

    def stopped(self, reason: str) -> None:
        """Training ended, for this reason; also after an exception."""
