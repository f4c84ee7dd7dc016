"""The settings of the validation set: when to evaluate, and which checkpoint is the best."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import Any

from quorate.data.dataloader import dataset_of
from quorate.data.source import length
from quorate.errors import SettingError
from quorate.settings import Settings, at_least, declare
from quorate.training.other_trainers import KEYWORDS_OF_OTHER_TRAINERS

DIRECTIONS = ("min", "max")


class BestMetric:
    """A named metric, and whether higher or lower values are better.

    Args:
        text: ``min:loss``, ``max:accuracy``.

    Raises:
        SettingError: the text has another form.
    """

    def __init__(self, text: str) -> None:
        direction, colon, self.name = str(text).partition(":")
        if direction not in DIRECTIONS or not colon or not self.name:
            raise SettingError(
                "best", text, "min:NAME or max:NAME of a metric", "for example best='max:accuracy'"
            )
        self.text = text
        self._sign = 1.0 if direction == "max" else -1.0

    def entry(self, metrics: dict[str, float], global_step: int) -> dict[str, Any]:
        """Return the entry of the best evaluation for a checkpoint."""
        return {"metric": self.name, "value": metrics[self.name], "global_step": global_step}

    def is_better(self, metrics: dict[str, float], best: dict[str, Any] | None) -> bool:
        """Return whether metrics beat the ``entry`` of the best so far; NaN never does.

        Raises:
            SettingError: there is no metric of this name.
        """
        if self.name not in metrics:
            known = ", ".join(sorted(metrics))
            raise SettingError("best", self.name, f"one of {known}", "the loss function names them")
        value = metrics[self.name]
        if best is None or best["metric"] != self.name:
            return not math.isnan(value)
        better: bool = self._sign * value > self._sign * best["value"]
        return better


class LossTrend:
    """The losses of a fit's evaluations, with a warning at the end if the loss has risen."""

    RISE = 1.1  # of the last loss over the lowest: a smaller rise may be noise

    def __init__(self) -> None:
        self._losses: list[tuple[str, float]] = []  # "epoch 3", and the loss of that time

    def add(self, when: str, loss: float) -> None:
        """Note the loss of an evaluation."""
        self._losses.append((when, loss))

    def warning(self) -> str | None:
        """Return a line if the loss was lower two evaluations ago or before; None otherwise."""
        earlier = self._losses[:-2]
        if not earlier:
            return None
        when, lowest = min(earlier, key=lambda item: item[1])
        _, last = self._losses[-1]
        if not 0 < lowest * self.RISE < last or lowest > min(loss for _, loss in self._losses):
            return None
        return (
            f"the validation loss was lowest at {when} ({lowest:.4f}) and is {last:.4f} now; stop "
            "earlier, or keep the best checkpoint: Validation(best='min:loss')"
        )


# Places of settings that once were keywords of ``fit``, or are known from other trainers.
FIT_KEYWORDS_ELSEWHERE = {
    **KEYWORDS_OF_OTHER_TRAINERS,
    "evaluate_every_epochs": "Validation(every_epochs=)",
    "evaluate_every_steps": "Validation(every_steps=)",
    "best": "Validation(best=)",
}


@dataclass(frozen=True)
class Validation(Settings):
    """Settings of the validation: the dataset, how often to evaluate, the best checkpoint.

    A plain dataset instead of ``Validation(...)`` sets ``dataset``.

    Args:
        dataset: a map-style dataset, or a ``DataLoader`` of a map-style dataset.
        every_epochs: epochs between two evaluations. The last update is always evaluated. Default:
            1.
        every_steps: updates between two evaluations. If set, ``every_epochs`` is ignored.
        best: direction and name of a metric, such as "max:accuracy" or "min:loss". The checkpoint
            with the best value of the metric is saved and kept. Default: no best checkpoint.

    Raises:
        DataError: the dataset is not a map-style dataset, or is empty.
        SettingError: a value is not valid.
    """

    dataset: Any
    _: KW_ONLY
    every_epochs: int = declare(1, "epochs between two evaluations", check=at_least(1))
    every_steps: int | None = declare(None, "updates between two evaluations", check=at_least(1))
    best: str | None = declare(
        None,
        "metric of the best checkpoint, with its direction: max:accuracy",
        check=lambda _, text: BestMetric(text).text,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        length(dataset_of(self.dataset), "validation")

    def is_due(self, global_step: int, steps_per_epoch: int, last_step: int) -> bool:
        """Return whether to evaluate after ``global_step`` updates."""
        every = self.every_steps or self.every_epochs * steps_per_epoch
        return global_step > 0 and (global_step % every == 0 or global_step == last_step)
