"""Logging to Weights & Biases: one wandb run per run directory, over all resumes."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from quorate.callbacks.learning_rates import learning_rates
from quorate.callbacks.run_id import RunId
from quorate.callbacks.samples import as_pixels
from quorate.callbacks.waiting import at_least
from quorate.errors import UserError
from quorate.services.report import Report
from quorate.training.callbacks import Callback, Run


class WandB(Callback):
    """Log metrics, learning rates, evaluations and samples to Weights & Biases.

    The id of the wandb run is stored in ``run_dir``, so a resumed run continues the same wandb run.
    Steps that are computed again after a resume log the same values again. For samples, pass this
    callback to ``Samples(to=)``.

    Args:
        every_steps: number of updates between two points. Default: 50.
        init: arguments for ``wandb.init``: project, name, mode="offline", ...

    Raises:
        SettingError: a value is not valid.
        UserError: the package wandb is not installed.
    """

    def __init__(self, *, every_steps: int = 50, **init: Any) -> None:
        try:
            import wandb
        except ImportError as error:
            raise UserError("WandB", "wandb is not installed", fix="pip install wandb") from error
        self._wandb: Any = wandb
        self._every_steps = at_least("every_steps", every_steps, 1)
        self._init = init
        self._trainer: Run | None = None
        self._run: Any = None

    def started(self, trainer: Run) -> None:
        """Start a wandb run, or continue the run with the stored id."""
        self._trainer = trainer
        remembered = RunId(trainer.run_dir, "wandb")
        options = {"resume": "allow", **self._init}
        if trainer.run_dir is not None:
            options.setdefault("dir", str(trainer.run_dir))
        if remembered.id is not None:
            options.setdefault("id", remembered.id)
        self._run = self._wandb.init(**options)
        remembered.keep(self._run.id)

    def updated(self, report: Report) -> None:
        """Log the update every ``every_steps`` updates."""
        if report.global_step % self._every_steps == 0 and self._trainer is not None:
            rates = learning_rates(self._trainer)
            self._run.log({**report.metrics, **rates}, step=report.global_step)

    def evaluated(self, global_step: int, metrics: dict[str, float]) -> None:
        """Log an evaluation."""
        named = {f"validation/{name}": value for name, value in metrics.items()}
        self._run.log(named, step=global_step)

    def stopped(self, reason: str) -> None:  # noqa: ARG002
        """End the wandb run."""
        if self._run is not None:
            self._run.finish()

    def take_samples(self, global_step: int, samples: Mapping[str, Any]) -> None:
        """Log images and texts."""
        logged: dict[str, Any] = {}
        for name, sample in samples.items():
            if isinstance(sample, str):
                logged[name] = self._wandb.Html(f"<pre>{escape(sample, quote=False)}</pre>")
            else:
                images = sample if sample.ndim == 4 else sample[None]
                logged[name] = [self._wandb.Image(as_pixels(image)) for image in images]
        self._run.log(logged, step=global_step)
