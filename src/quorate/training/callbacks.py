"""Callbacks: user code called by ``fit`` after updates, evaluations and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from quorate.errors import SettingError
from quorate.services.report import Report

# The methods that each callback has, called during training.
METHODS = ("started", "updated", "evaluated", "saved", "stopped")
VALIDATION = "validation/"  # prefix of a validation metric, where other metrics may be meant


class Run(Protocol):
    """The part of a ``Trainer`` that a callback may use."""

    model: torch.nn.Module

    @property
    def run_dir(self) -> Path | None:
        """The run directory, or None if nothing is saved."""

    @property
    def global_step(self) -> int:
        """Number of updates applied so far."""

    @property
    def averaged_model(self) -> torch.nn.Module | None:
        """A copy of the model with the averaged weights; None without ``Optimize(ema_decay=)``."""

    @property
    def summaries(self) -> Any:
        """TensorBoard's ``SummaryWriter``; None without ``run_dir`` or without summaries."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the optimizer. You may read and change the groups."""

    def evaluate(self, dataset: Any, *, averaged: bool | None = None) -> dict[str, float]:
        """Return the mean loss and metrics over a dataset; see ``Trainer.evaluate``."""

    def predict(
        self,
        dataset: Any,
        function: Callable[[torch.nn.Module, Any], Any] | None = None,
        *,
        to: str | Path | None = None,
        averaged: bool | None = None,
    ) -> Any:
        """Return the outputs of the model for all rows of a dataset; see ``Trainer.predict``."""

    def weights(self) -> dict[str, torch.Tensor]:
        """Return a copy of all weights and buffers, plain and averaged."""

    def take_weights(self, weights: dict[str, torch.Tensor]) -> None:
        """Set the model, and the averaged weights, to copies that ``weights`` returned."""

    def stop(self, reason: str = ...) -> None:
        """Finish the current step, then end the run."""


def check_callbacks(callbacks: object) -> tuple[Callback, ...]:
    """Return callbacks as a tuple, after checking that each has the methods of ``Callback``.

    Raises:
        SettingError: the argument is no sequence of callbacks.
    """
    expected, fix = "a list of objects that inherit from quorate.Callback", "pass callbacks=[mine]"
    if not isinstance(callbacks, Iterable) or isinstance(callbacks, (str, bytes)):
        raise SettingError("callbacks", type(callbacks).__name__, expected, fix)
    found = tuple(callbacks)
    for callback in found:
        lacking = [name for name in METHODS if not callable(getattr(callback, name, None))]
        if lacking or isinstance(callback, type):
            raise SettingError("callbacks", callback, expected, fix)
    names = [name_of(callback) for callback in found if defines(callback, "state_dict")]
    if twice := [name for name in names if names.count(name) > 1]:
        expected, fix = "a name of its own for each that has a state", "set its attribute name"
        raise SettingError("callbacks", f"{len(twice)} called {twice[0]!r}", expected, fix)
    return found


def name_of(callback: Callback) -> str:
    """Return the name of a callback's state in checkpoints."""
    return getattr(callback, "name", None) or type(callback).__name__


def metrics_of(callbacks: Iterable[Callback]) -> list[tuple[str, str]]:
    """Return the validation metrics needed by callbacks, as pairs of callback name and metric."""
    return [
        (name_of(callback), metric.removeprefix(VALIDATION))
        for callback in callbacks
        for metric in getattr(callback, "metrics", ())
    ]


def states_of(
    callbacks: Iterable[Callback], before: Mapping[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Return the states of callbacks by name.

    Args:
        before: the states in the checkpoint of the resumed run. States of callbacks that this run
            does not have are kept.
    """
    now = {name_of(each): each.state_dict() for each in callbacks if defines(each, "state_dict")}
    return {**before, **now}


def restore_callbacks(callbacks: Iterable[Callback], saved: Mapping[str, dict[str, Any]]) -> None:
    """Load the states of callbacks from a checkpoint."""
    for callback in callbacks:
        if defines(callback, "load_state_dict") and (name := name_of(callback)) in saved:
            callback.load_state_dict(saved[name])


def defines(callback: Callback, method: str) -> bool:
    """Return whether a callback overrides a method. Inherited methods do nothing."""
    own = getattr(type(callback), method, None)
    return method in vars(callback) or own not in (None, getattr(Callback, method))


class Callback:
    """Base class of callbacks. Inherit from ``Callback``, and define the methods you need.

    ``fit`` calls all methods in its own thread, between two updates. A method may read and change
    ``trainer.model`` and call ``trainer.evaluate`` and ``trainer.stop``. All workers receive the
    changed model before the next shard; docs/checkpoints.md lists what may be changed. An exception
    in a callback ends the run like any exception in your code: the state is saved first.

    To keep the state of a callback over a resume, define ``state_dict`` and ``load_state_dict``.
    The state is stored in every checkpoint under ``name``.
    """

    #: Name of the state in checkpoints; unique in a run. None: the name of the class.
    name: str | None = None
    #: Metrics of the validation set that the callback needs; checked before the first update.
    metrics: Sequence[str] = ()

    def started(self, trainer: Run) -> None:
        """React to the start of training, or to a resume after ``trainer.global_step`` updates."""

    def updated(self, report: Report) -> None:
        """React to an update. Called after each update."""

    def evaluated(self, global_step: int, metrics: dict[str, float]) -> None:
        """React to an evaluation of the validation set."""

    def saved(self, global_step: int, path: Path) -> None:
        """React to a checkpoint of this step. The checkpoint is on the disk."""

    def stopped(self, reason: str) -> None:
        """React to the end of training, also after an exception. ``reason`` says why."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save.

        Allowed values: tensors, numbers, strings, and dicts, lists and tuples of these.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that ``state_dict`` returned.

        Called before ``started`` when a run resumes.
        """
