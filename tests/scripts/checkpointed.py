"""A training with a checkpoint of commit 1ed5e4f: see ``support/trainings/checkpoints.py``.

    quorate run --devices cpu --workers 2 --run-dir RUN tests/scripts/checkpointed.py NAME FOLDER

Arguments: a name of ``CHECKPOINTS``; a folder for files of the dataset. The last line printed is
JSON: state outside of the model.
"""

import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.digests import digest
from support.trainings.checkpoints import CHECKPOINTS, STEPS
from support.trainings.datasets import BATCH, make_data
from support.trainings.models import MODELS, Batch, classify, linear
from support.trainings.optimizers import make_optimize

import quorate
from quorate.callbacks import ReduceLROnPlateau

NAME, FOLDER = sys.argv[1:]
NOT_FINITE = (1, 6)  # updates of "skipped", on both sides of its checkpoint


def not_finite(model: Any, batch: Batch, at: Any) -> dict[str, Any]:
    """Return a loss that is infinite in the updates ``NOT_FINITE``."""
    found = classify(model, batch)
    return {**found, "loss": found["loss"] * (math.inf if at.step in NOT_FINITE else 1.0)}


class Mean:
    """A teacher, and other values for the loss, outside of the model."""

    def __init__(self) -> None:
        torch.manual_seed(5)
        self.teacher = linear()
        self.values = quorate.Shared(
            "mean", teacher=self.teacher, weight=0.1, text="first", last=torch.zeros(2, 3)
        )

    def loss(self, model: Any, batch: Batch) -> dict[str, Any]:
        """Return the loss with a second term: the distance to the teacher's logits."""
        found = classify(model, batch)
        distance = (model(batch[0]) - self.values.teacher(batch[0])).square().mean()
        shift = self.values.last.sum() * model.last.bias.sum()
        return {**found, "loss": found["loss"] + self.values.weight * distance + shift}

    def state(self) -> dict[str, Any]:
        """Return numbers, and the digest of tensors."""
        tensors = [*self.teacher.state_dict().items(), ("last", self.values.last)]
        return {"weight": self.values.weight, "text": self.values.text, "digest": digest(tensors)}


class Follows(quorate.Callback):
    """Sets the shared values after each update."""

    def __init__(self, mean: Mean) -> None:
        self.mean = mean

    def started(self, run: Any) -> None:
        self.student = run.model

    def updated(self, report: quorate.Report) -> None:
        values = self.mean.values
        values.weight = values.weight * 0.9
        values.text = f"update {report.global_step}"
        values.last = 0.01 * self.student.last.weight.detach()[:2, :3].clone()
        with torch.no_grad():
            for average, new in zip(
                self.mean.teacher.parameters(), self.student.parameters(), strict=True
            ):
                average.lerp_(new, 0.1)


class Amends(quorate.Callback):
    """Pulls the weights to an average, kept as the callback's state."""

    def __init__(self) -> None:
        self.average: torch.Tensor | None = None
        self.seen: dict[str, Any] = {"losses": [], "best": None}

    def started(self, run: Any) -> None:
        self.model = run.model

    def updated(self, report: quorate.Report) -> None:
        weight = self.model.last.weight.detach()
        last = weight.clone() if self.average is None else self.average
        self.average = 0.8 * last + 0.2 * weight
        with torch.no_grad():
            weight.lerp_(self.average, 0.05)
        self.seen["losses"] = [*self.seen["losses"][-2:], report.metrics["loss"]]

    def evaluated(self, global_step: int, metrics: dict[str, float]) -> None:
        self.seen["best"] = (global_step, metrics["loss"])

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average, self.seen = state["average"], state["seen"]


configuration = CHECKPOINTS[NAME]
model = MODELS[configuration.model]
data = make_data(configuration.data, model.inputs, Path(FOLDER))
optimize: Any = make_optimize(configuration.optimizer, configuration.options, model.phases)
loss: Any = model.loss
callbacks: list[quorate.Callback] = []
state: Callable[[], object] = dict

if NAME == "skipped":
    loss, optimize = not_finite, replace(optimize, nonfinite="skip")
elif NAME == "shared":
    mean = Mean()
    loss, callbacks, state = mean.loss, [Follows(mean)], mean.state
elif NAME == "callbacks":
    amends = Amends()
    callbacks = [amends, ReduceLROnPlateau(patience=0, min_delta=9.0, factor=0.5)]
    state = lambda: {  # noqa: E731
        "seen": amends.seen,
        "lr": trainer.param_groups[0]["lr"],
        "digest": digest([("average", amends.average)]),  # type: ignore[list-item]
    }

trainer = quorate.Trainer(
    model.make,
    loss,
    optimizer=optimize,
    batch_size=BATCH,
    shards=configuration.shards,
    seed=configuration.seed,
    loading=quorate.Loading(**data.loading),
)
trainer.fit(
    data.dataset,
    steps=STEPS,
    validation=data.validation if "validation" in configuration.options else None,
    callbacks=callbacks,
)
print(json.dumps(state()))
