"""Trainings in this process: a single call makes a trainer, and trains.

    trainer = fit(nn.Linear(6, 1), squares, rows(60), epochs=2, workers=3, clip_norm=1.0)
    assert digest_of(trainer) == digest_of(fit(..., workers=1))

Models, losses and data for several tests are in ``support/small.py`` (all parts of a checkpoint),
``support/everything.py`` (all influences on bits) and ``support/trainings`` (by name).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from support import front_door
from torch import nn
from torch.utils.data import TensorDataset

import quorate

DEFAULTS = {"batch_size": 12, "shards": 4, "devices": "cpu"}
OF_FIT = ("steps", "epochs", "max_time_s", "shuffle")


def rows(count: int, inputs: int = 6, seed: int = 0) -> TensorDataset:
    """Return rows of (features, target): ``count x inputs`` and ``count x 1`` normal floats."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(count, inputs, generator=generator)
    return TensorDataset(features, torch.randn(count, 1, generator=generator))


def squares(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the mean squared error."""
    return (model(batch[0]) - batch[1]).square().mean()


def sgd(params: Any) -> torch.optim.Optimizer:
    """Return plain SGD with the learning rate 0.1."""
    return torch.optim.SGD(params, lr=0.1)


class Calls(quorate.Callback):
    """A callback of functions: ``Calls(lambda trainer, report: ...)``.

    Args:
        updated: called after each update with the trainer and the report.
        evaluated: called after each evaluation with the trainer and the metrics.
    """

    def __init__(
        self,
        updated: Callable[[Any, quorate.Report], object] = lambda *_: None,
        evaluated: Callable[[Any, dict[str, float]], object] = lambda *_: None,
    ) -> None:
        self._updated, self._evaluated = updated, evaluated

    def started(self, trainer: Any) -> None:
        self._trainer = trainer

    def updated(self, report: quorate.Report) -> None:
        self._updated(self._trainer, report)

    def evaluated(self, global_step: int, metrics: dict[str, float]) -> None:
        self._evaluated(self._trainer, metrics)


def fit(
    model: Any = None,
    loss: Callable[..., Any] = squares,
    data: Any = None,
    *,
    callbacks: Sequence[quorate.Callback] = (),
    validation: Any = None,
    **settings: Any,
) -> quorate.Trainer:
    """Train to the end, and return the trainer.

    Args:
        model: a module or a function that makes a module; default: a ``Linear(6, 1)``.
        loss: see ``Trainer``.
        data: see ``fit``; 60 rows.
        callbacks: see ``fit``.
        validation: see ``fit``.
        settings: ``OF_FIT``, and the settings of ``Trainer`` by their names at the command, see
            ``front_door``; beside ``DEFAULTS``.
    """
    of_fit = {name: settings.pop(name) for name in OF_FIT if name in settings}
    torch.manual_seed(3)
    made = nn.Linear(6, 1) if model is None else model
    trainer = front_door.trainer(made, loss, **{"optimizer": sgd, **DEFAULTS, **settings})
    trainer.fit(
        rows(60) if data is None else data, validation=validation, callbacks=[*callbacks], **of_fit
    )
    return trainer
