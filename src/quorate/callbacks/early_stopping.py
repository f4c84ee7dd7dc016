"""Early stopping: end a run when a metric stops improving."""

from __future__ import annotations

from typing import Any

import torch

from quorate.callbacks.waiting import PatienceCount, at_least
from quorate.training.callbacks import Callback, Run


class EarlyStopping(Callback):
    """Stop training when a validation metric has not improved for several evaluations.

    The state of this callback, and with ``restore`` the best weights, are stored in every
    checkpoint. A resumed run stops at the same update as an uninterrupted run; a run that early
    stopping has ended does not train further.

    Args:
        metric: name of a metric of the validation set: "loss", "accuracy". Default: "loss".
        mode: "min" if lower is better (the default), "max" if higher is better.
        patience: number of consecutive evaluations without improvement after which training stops.
            Default: 3.
        min_delta: smallest change that counts as an improvement. Default: 0.
        restore: whether to give the model, and the averaged weights, the weights of the best
            evaluation at the end. Costs the size of the weights in memory and in each checkpoint.
            The newest checkpoint still holds the state of the last update. Default: True.

    Raises:
        SettingError: a value is not valid.
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
        self._waiting = PatienceCount(metric, mode, min_delta)
        self.metrics = (self._waiting.metric,)
        self._patience = at_least("patience", patience, 1)
        self._restore = restore
        self._best: dict[str, torch.Tensor] = {}
        self._trainer: Run | None = None
        self.best_step: int | None = None  # number of updates at the best evaluation

    @property
    def best(self) -> float | None:
        """The best value of the metric so far."""
        return self._waiting.best

    def started(self, trainer: Run) -> None:
        """Stop at once if early stopping has already ended this run."""
        self._trainer = trainer
        self._stop_if_due()

    def evaluated(self, global_step: int, metrics: dict[str, float]) -> None:
        """Compare the metric with the best value, and stop if ``patience`` is used up."""
        assert self._trainer is not None
        if self._waiting.takes(metrics):
            self.best_step = global_step
            if self._restore:
                self._best = self._trainer.weights()
        self._stop_if_due()

    def stopped(self, reason: str) -> None:  # noqa: ARG002
        """Give the model the best weights. The last state was saved before."""
        if self._best and self._trainer is not None and self._waiting.since:
            self._trainer.take_weights(self._best)

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save."""
        return {**self._waiting.state_dict(), "best_step": self.best_step, "weights": self._best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the saved state."""
        self._waiting.load_state_dict(state)
        self.best_step, self._best = state["best_step"], state["weights"]

    def _stop_if_due(self) -> None:
        if self._waiting.since >= self._patience and self._trainer is not None:
            best = f"the best was {self._waiting.best:.4g} after step {self.best_step}"
            self._trainer.stop(
                f"{self._waiting.metric} did not improve for {self._waiting.since} evaluations: "
                f"{best}"
            )
