"""Logging to MLflow: one MLflow run per run directory, over all resumes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quorate.callbacks.learning_rates import learning_rates
from quorate.callbacks.run_id import RunId
from quorate.callbacks.samples import as_pixels
from quorate.callbacks.waiting import at_least
from quorate.errors import UserError
from quorate.services.report import Report
from quorate.training.callbacks import Callback, Run


class MLflow(Callback):
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
        self._client: Any = MlflowClient(tracking_uri)
        self._experiment, self._run_name = experiment, run_name
        self._params = dict(params or {})
        self._every_steps = at_least("every_steps", every_steps, 1)
        self._trainer: Run | None = None
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

    def updated(self, report: Report) -> None:
        """Log the update every ``every_steps`` updates."""
        if report.global_step % self._every_steps == 0 and self._trainer is not None:
            self._log({**report.metrics, **learning_rates(self._trainer)}, report.global_step)

    def evaluated(self, global_step: int, metrics: dict[str, float]) -> None:
        """Log an evaluation."""
        self._log({f"validation/{name}": value for name, value in metrics.items()}, global_step)

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
