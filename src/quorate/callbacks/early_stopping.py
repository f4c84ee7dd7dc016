"""Early stopping: a run ends when a metric gets no better, with the weights that were the best."""

from __future__ import annotations

from typing import Any

import torch

from quorate.callbacks.waiting import Waiting, at_least
from quorate.training.callbacks import Callback, Run


class EarlyStopping(Callback):
    """Stop when a metric of the validation set was not better for some evaluations.

    What it has seen, and with ``restore`` the best weights, lies in every checkpoint: a run that is
    resumed stops where it would have, and one that was stopped does not go on.

    Args:
        metric: of the validation set: "loss", "accuracy".
        mode: "min" if less is better, "max" if more is.
        patience: stop at this evaluation in a row that is not better.
        min_delta: by how much it has to be better to count.
        restore: give the model, and the averaged weights, those of the best evaluation in the end.
            It costs their size in memory and in each checkpoint. The newest checkpoint has the
            state of the last update, as ever.

    Raises:
        SettingError: a value cannot work.
    """

    def __init__(
        self,
        metric: str = "loss",
        *,
        mode: str = "min",
        patience: int = 3,
        min_delta: float = 0.0,
        restore: bool = True,
    ) -> None:
        self._waiting = Waiting(metric, mode, min_delta)
        self.metrics = (self._waiting.metric,)
        self._patience = at_least("patience", patience, 1)
        self._restore = restore
        self._best: dict[str, torch.Tensor] = {}
        self._trainer: Run | None = None
        self.best_step: int | None = None  # updates, when it was the best

    @property
    def best(self) -> float | None:
        """The best value so far."""
        return self._waiting.best

    def started(self, trainer: Run) -> None:
        """Stop at once, if the run was stopped before."""
        self._trainer = trainer
        self._stop_if_due()

    def evaluated(self, global_step: int, metrics: dict[str, float]) -> None:
        """Look whether it is better, and stop if it was not for long enough."""
        assert self._trainer is not None
        if self._waiting.takes(metrics):
            self.best_step = global_step
            if self._restore:
                self._best = self._trainer.weights()
        self._stop_if_due()

    def stopped(self, reason: str) -> None:  # noqa: ARG002
        """Give the model the best weights. The last state is saved by then."""
        if self._best and self._trainer is not None and self._waiting.since:
            self._trainer.take_weights(self._best)

    def state_dict(self) -> dict[str, Any]:
        """Return what to save."""
        return {**self._waiting.state_dict(), "best_step": self.best_step, "weights": self._best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what was saved."""
        self._waiting.load_state_dict(state)
        self.best_step, self._best = state["best_step"], state["weights"]

    def _stop_if_due(self) -> None:
        if self._waiting.since >= self._patience and self._trainer is not None:
            best = f"the best was {self._waiting.best:.4g} after step {self.best_step}"
            self._trainer.stop(
                f"{self._waiting.metric} did not improve for {self._waiting.since} evaluations: "
                f"{best}"
            )
