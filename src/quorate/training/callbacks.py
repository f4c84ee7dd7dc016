"""Callbacks: what people add to ``fit``. Early stopping, images in a summary, sample text, ..."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import torch

from quorate.errors import SettingError
from quorate.services.report import Report


class Run(Protocol):
    """What a callback has of the ``Trainer``."""

    model: torch.nn.Module

    @property
    def run_dir(self) -> Path | None:
        """Where the run is saved."""

    @property
    def global_step(self) -> int:
        """Updates applied so far."""

    @property
    def averaged_model(self) -> torch.nn.Module | None:
        """A copy of the model with the averaged weights, if there are any."""

    @property
    def summaries(self) -> Any:
        """TensorBoard's ``SummaryWriter``; None without ``run_dir`` or summaries."""

    def evaluate(self, dataset: Any, *, averaged: bool | None = None) -> dict[str, float]:
        """Return means of loss and metrics over a dataset."""

    def stop(self, reason: str = ...) -> None:
        """Finish the step under way, then end."""


def checked(callbacks: object) -> tuple[Callback, ...]:
    """Return callbacks, each with the methods that a ``Callback`` has.

    Raises:
        SettingError: they are no sequence of such.
    """
    expected, fix = "a list of objects that inherit from quorate.Callback", "pass callbacks=[mine]"
    if not isinstance(callbacks, Iterable) or isinstance(callbacks, (str, bytes)):
        raise SettingError("callbacks", type(callbacks).__name__, expected, fix)
    found = tuple(callbacks)
    methods = [name for name in vars(Callback) if not name.startswith("_")]
    for callback in found:
        lacking = [name for name in methods if not callable(getattr(callback, name, None))]
        if lacking or isinstance(callback, type):
            raise SettingError("callbacks", callback, expected, fix)
    return found


def defines(callback: Callback, method: str) -> bool:
    """Return whether a callback has a method of its own: the others do nothing."""
    is_inherited = getattr(type(callback), method, None) is getattr(Callback, method)
    return method in vars(callback) or not is_inherited


class Callback:
    """Inherit from it, and define what is of interest.

    All methods are called in the thread of ``fit``, between two updates: ``trainer.model`` may be
    read and changed (all workers get it before the next shard; docs/checkpoints.md says what), and
    ``trainer.evaluate`` and ``trainer.stop`` be called. What they raise ends the run as any
    exception of the user's own code does: the state is saved.
    """

    def started(self, trainer: Run) -> None:
        """Begin: training starts, or goes on after ``trainer.global_step`` updates."""

    def updated(self, report: Report) -> None:
        """Take notice of an update that was made."""

    def evaluated(self, global_step: int, metrics: dict[str, float]) -> None:
        """Take notice of an evaluation of the validation set."""

    def saved(self, global_step: int, path: Path) -> None:
        """Take notice of a checkpoint of this step, which is on the disk."""

    def stopped(self, reason: str) -> None:
        """End: training is over, for this reason; also after an exception."""
