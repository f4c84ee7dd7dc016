"""Loggers: updates, evaluations and learning rates for other services, and for Python's logging.

Each service has one run per run directory, over all resumes. The ids of these runs lie beside the
logs of the run directory and are moved aside together with them: a fresh run begins a new run at
the service.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from quorate.callbacks.samples import as_pixels
from quorate.errors import UserError
from quorate.machine.atomic_file import write_atomically
from quorate.machine.regular_file import read_regular
from quorate.services.report import Report
from quorate.settings import integer
from quorate.training.callbacks import Callback, Run


def _every(steps: int) -> int:
    return integer("every_steps", steps, least=1, fix="for example every_steps=1")


def learning_rates(trainer: Run) -> dict[str, float]:
    """Return the learning rate of each group of the optimizer: "lr/0", or by the group's name."""
    return {
        f"lr/{group.get('name', number)}": float(group["lr"])
        for number, group in enumerate(trainer.param_groups)
    }


class LearningRateMonitor(Callback):
    """Write the learning rates of all parameter groups to TensorBoard, as of the next update.

    ``WandB`` and ``MLflow`` log the learning rates without this callback. ``Report.lr`` is the
    learning rate of the first group.

    Args:
        every_steps: number of updates between two points. Default: 50.

    Raises:
        SettingError: a value is not valid.
    """

    def __init__(self, every_steps: int = 50) -> None:
        self._every_steps = _every(every_steps)
        self._trainer: Run | None = None

    def started(self, trainer: Run) -> None:
        """Keep the trainer."""
        self._trainer = trainer

    def updated(self, report: Report) -> None:
        """Write a point every ``every_steps`` updates."""
        n, trainer = report.global_step, self._trainer
        if n % self._every_steps == 0 and trainer is not None and trainer.summaries is not None:
            for name, rate in learning_rates(trainer).items():
                trainer.summaries.add_scalar(name, rate, n)


class LogLines(Callback):
    """Log updates, evaluations, checkpoints and the end of training to Python's logging.

    Args:
        logger: a logger, or the name of a logger. Default: "quorate.run".
        level: level of all lines. Default: ``logging.INFO``.
        every_steps: number of updates between two lines. Default: 50.

    Raises:
        SettingError: a value is not valid.
    """

    def __init__(
        self,
        logger: logging.Logger | str = "quorate.run",
        *,
        level: int = logging.INFO,
        every_steps: int = 50,
    ) -> None:
        self._logger = logging.getLogger(logger) if isinstance(logger, str) else logger
        self._level = level
        self._every_steps = _every(every_steps)

    def started(self, trainer: Run) -> None:
        """Log the step at which training begins."""
        self._log("training starts after step %d", trainer.global_step)

    def updated(self, report: Report) -> None:
        """Log a line every ``every_steps`` updates."""
        if report.global_step % self._every_steps == 0:
            found = _words(report.metrics)
            self._log("step %d of %d: %s", report.global_step, report.last_step, found)

    def evaluated(self, global_step: int, metrics: dict[str, float]) -> None:
        """Log an evaluation."""
        self._log("step %d: validation: %s", global_step, _words(metrics))

    def saved(self, global_step: int, path: Path) -> None:
        """Log a checkpoint."""
        self._log("saved step %d to %s", global_step, path)

    def stopped(self, reason: str) -> None:
        """Log the reason for the end of training."""
        self._log("training ended: %s", reason)

    def _log(self, text: str, *values: object) -> None:
        self._logger.log(self._level, text, *values)


def _words(metrics: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.6g}" for name, value in metrics.items())


_MOST_BYTES = 256
_ID = re.compile(r"[\w.-]{1,128}")


class RunId:
    """The id of this run at a logger.

    Args:
        run_dir: the directory for the id; None: the id is not stored.
        logger: the name of the logger: "wandb", "mlflow".

    Raises:
        UserError: the stored text is no id.
    """

    def __init__(self, run_dir: Path | None, logger: str) -> None:
        self._path = None if run_dir is None else run_dir / f"{logger}.id"
        self.id: str | None = None
        if self._path is None or not self._path.exists():
            return
        try:
            text = read_regular(self._path, _MOST_BYTES).decode().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(self._path, error, fix="remove the file") from error
        if not _ID.fullmatch(text):
            raise UserError(
                self._path,
                got=f"{text!r:.80}",
                expected="an id",
                fix="remove the file",
            )
        self.id = text

    def keep(self, text: str) -> None:
        """Store the id, for a resume."""
        if self._path is not None and text != self.id:
            write_atomically(self._path, f"{text}\n")


class MetricsLogger(Callback):
    """A callback that logs metrics and learning rates now and then, and all evaluations.

    Args:
        every_steps: number of updates between two points.

    Raises:
        SettingError: the number is not valid.
    """

    def __init__(self, every_steps: int) -> None:
        self._every_steps = _every(every_steps)
        self._trainer: Run | None = None

    def updated(self, report: Report) -> None:
        """Log the update every ``every_steps`` updates."""
        if report.global_step % self._every_steps == 0 and self._trainer is not None:
            self._log({**report.metrics, **learning_rates(self._trainer)}, report.global_step)

    def evaluated(self, global_step: int, metrics: dict[str, float]) -> None:
        """Log an evaluation."""
        self._log({f"validation/{name}": value for name, value in metrics.items()}, global_step)

    def _log(self, values: Mapping[str, float], step: int) -> None:
        raise NotImplementedError


class WandB(MetricsLogger):
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
        super().__init__(every_steps)
        self._wandb: Any = wandb
        self._init = init
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

    def _log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(values, step=step)


class MLflow(MetricsLogger):
    """Log metrics, learning rates, evaluations and samples to MLflow.

    The id of the MLflow run is stored in ``run_dir``, so a resumed run continues the same MLflow
    run. The active run of MLflow's own functions is not changed. For samples, pass this callback to
    ``Samples(to=)``.

    Args:
        experiment: name of the experiment; created if missing. Default: "quorate".
        tracking_uri: where MLflow stores runs. Default: MLflow's own setting.
        run_name: name of the run in MLflow. Default: chosen by MLflow.
        params: parameters to log once, when the run begins.
        every_steps: number of updates between two points. Default: 50.

    Raises:
        SettingError: a value is not valid.
        UserError: the package mlflow is not installed.
    """

    def __init__(
        self,
        experiment: str = "quorate",
        *,
        tracking_uri: str | None = None,
        run_name: str | None = None,
        params: Mapping[str, Any] | None = None,
        every_steps: int = 50,
    ) -> None:
        try:
            from mlflow.tracking import MlflowClient
        except ImportError as error:
            raise UserError(
                "MLflow",
                "mlflow is not installed",
                fix="pip install mlflow",
            ) from error
        super().__init__(every_steps)
        self._client: Any = MlflowClient(tracking_uri)
        self._experiment, self._run_name = experiment, run_name
        self._params = dict(params or {})
        self._id: str | None = None

    def started(self, trainer: Run) -> None:
        """Start an MLflow run, or continue the run with the stored id."""
        self._trainer, client = trainer, self._client
        remembered = RunId(trainer.run_dir, "mlflow")
        self._id = remembered.id
        if self._id is not None:
            client.update_run(self._id, status="RUNNING")
            return
        there = client.get_experiment_by_name(self._experiment)
        number = (
            client.create_experiment(self._experiment) if there is None else there.experiment_id
        )
        self._id = client.create_run(number, run_name=self._run_name).info.run_id
        remembered.keep(self._id)
        for name, value in self._params.items():
            client.log_param(self._id, name, value)

    def stopped(self, reason: str) -> None:  # noqa: ARG002
        """End the MLflow run."""
        if self._id is not None:
            self._client.set_terminated(self._id)

    def take_samples(self, global_step: int, samples: Mapping[str, Any]) -> None:
        """Log images and texts as artifacts."""
        for name, sample in samples.items():
            if isinstance(sample, str):
                self._client.log_text(self._id, sample, f"{name}/{global_step}.txt")
                continue
            for number, image in enumerate(sample if sample.ndim == 4 else sample[None]):
                file = f"{name}/{global_step}-{number}.png"
                self._client.log_image(self._id, as_pixels(image), file)

    def _log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._client.log_metric(self._id, name, value, step=step)
