"""Callbacks: what people add to ``fit``. Early stopping, images in a summary, sample text, ..."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from quorate.errors import SettingError
from quorate.services.report import Report

# The methods that are called while training goes on.
TOLD = ("started", "updated", "evaluated", "saved", "stopped")
VALIDATION = "validation/"  # before the name of a metric, where others may be meant


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

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups, which may be read and changed."""

    def evaluate(self, dataset: Any, *, averaged: bool | None = None) -> dict[str, float]:
        """Return means of loss and metrics over a dataset."""

    def predict(
        self,
        dataset: Any,
        function: Callable[[torch.nn.Module, Any], Any] | None = None,
        *,
        to: str | Path | None = None,
        averaged: bool | None = None,
    ) -> Any:
        """Return what the model returns for every row of a dataset."""

    def weights(self) -> dict[str, torch.Tensor]:
        """Return a copy of all weights and buffers, plain and averaged."""

    def take_weights(self, weights: dict[str, torch.Tensor]) -> None:
        """Give the model what ``weights`` returned."""

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
    for callback in found:
        lacking = [name for name in TOLD if not callable(getattr(callback, name, None))]
        if lacking or isinstance(callback, type):
            raise SettingError("callbacks", callback, expected, fix)
    names = [name_of(callback) for callback in found if defines(callback, "state_dict")]
    if twice := [name for name in names if names.count(name) > 1]:
        expected, fix = "a name of its own for each that has a state", "set its attribute name"
        raise SettingError("callbacks", f"{len(twice)} called {twice[0]!r}", expected, fix)
    return found


def name_of(callback: Callback) -> str:
    """Return the name under which checkpoints have what a callback keeps."""
    return getattr(callback, "name", None) or type(callback).__name__


def metrics_of(callbacks: Iterable[Callback]) -> list[tuple[str, str]]:
    """Return which metrics of the validation set callbacks need, each with who needs it."""
    return [
        (name_of(callback), metric.removeprefix(VALIDATION))
        for callback in callbacks
        for metric in getattr(callback, "metrics", ())
    ]


def kept_by(
    callbacks: Iterable[Callback], before: Mapping[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Return what callbacks keep, by their names.

    Args:
        before: what those kept that a run had before; who is not there any more is kept on.
    """
    now = {name_of(each): each.state_dict() for each in callbacks if defines(each, "state_dict")}
    return {**before, **now}


def give_back(callbacks: Iterable[Callback], saved: Mapping[str, dict[str, Any]]) -> None:
    """Give callbacks what they kept when a checkpoint was saved."""
    for callback in callbacks:
        if defines(callback, "load_state_dict") and (name := name_of(callback)) in saved:
            callback.load_state_dict(saved[name])


def defines(callback: Callback, method: str) -> bool:
    """Return whether a callback has a method of its own: the others do nothing."""
    own = getattr(type(callback), method, None)
    return method in vars(callback) or own not in (None, getattr(Callback, method))


class Callback:
    """Inherit from it, and define what is of interest.

    All methods are called in the thread of ``fit``, between two updates: ``trainer.model`` may be
    read and changed (all workers get it before the next shard; docs/checkpoints.md says what), and
    ``trainer.evaluate`` and ``trainer.stop`` be called. What they raise ends the run as any
    exception of the user's own code does: the state is saved.

    What has to outlast a resume ``state_dict`` returns and ``load_state_dict`` takes: it lies in
    every checkpoint, under ``name``.
    """

    #: Under which checkpoints have its state; of two of a class one needs another. None: the class.
    name: str | None = None
    #: Metrics of the validation set that it needs: looked for before the first update.
    metrics: Sequence[str] = ()

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

    def state_dict(self) -> dict[str, Any]:
        """Return what to save: tensors, numbers, texts, and dicts, lists and tuples of these."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what ``state_dict`` returned: called before ``started``, where a run goes on."""
