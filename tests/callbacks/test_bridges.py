"""Bridges to loggers of others: a single run there for a single run here, despite resumes."""

import importlib.util
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support import small
from support.messages import expect_error
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import quorate
from quorate.callbacks import LearningRateMonitor, LogLines, MLflow, Samples, WandB
from quorate.callbacks.loggers import RunId
from quorate.errors import SettingError, UserError


def make_samples(_: Any) -> dict[str, torch.Tensor | str]:
    return {"image": torch.rand(3, 4, 4), "images": torch.rand(2, 1, 4, 4), "text": "a < b"}


def fit(run_dir: Path | None, steps: int, *callbacks: quorate.Callback) -> quorate.Trainer:
    made = small.trainer(run_dir, 1)
    made.fit(
        small.DATA,
        steps=steps,
        validation=quorate.Validation(small.DATA, every_steps=3),
        callbacks=callbacks,
    )
    return made


def test_lines_for_logging(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with caplog.at_level(logging.INFO, "quorate.run"):
        fit(tmp_path, 4, LogLines(every_steps=2))
    lines = [record.getMessage() for record in caplog.records if record.name == "quorate.run"]
    assert lines[0] == "training starts after step 0"
    assert [line.partition(":")[0] for line in lines[1:-1]] == [
        "step 2 of 4",
        "step 3",
        "step 4 of 4",
        "step 4",
        f"saved step 4 to {tmp_path}/checkpoints/step-000000000004",
    ]
    assert lines[-1] == "training ended: all steps are done"


def test_samples_and_learning_rates_in_tensorboard(tmp_path: Path) -> None:
    for steps in (3, 6):
        fit(tmp_path, steps, LearningRateMonitor(2), Samples(make_samples))
    events = EventAccumulator(str(tmp_path / "summaries")).Reload()
    assert [point.step for point in events.Scalars("lr/0")] == [2, 4, 6]
    assert [point.step for point in events.Images("image")] == [3, 6]
    assert "images" in "".join(events.Tags()["images"])
    assert [point.step for point in events.Tensors("text/text_summary")] == [3, 6]


def test_samples_that_are_none_are_named() -> None:
    with expect_error(SettingError, name="sample 'x'"):
        fit(None, 3, Samples(lambda _: {"x": torch.zeros(4)}))
    with expect_error(SettingError, name="to", got="LogLines"):
        Samples(make_samples, to=[LogLines()])  # type: ignore[list-item]


def test_an_id_is_kept_and_goes_aside_with_the_run(tmp_path: Path) -> None:
    fit(tmp_path, 3)
    assert RunId(tmp_path, "wandb").id is None
    RunId(tmp_path, "wandb").keep("abc-1")
    assert RunId(tmp_path, "wandb").id == "abc-1"
    again = small.trainer(quorate.RunDir(tmp_path, fresh=True), 1)
    again.fit(small.DATA, steps=1)
    assert RunId(tmp_path, "wandb").id is None
    assert (tmp_path / "aside-1" / "wandb.id").exists()
    (tmp_path / "wandb.id").write_text("../../etc")
    with expect_error(UserError):
        RunId(tmp_path, "wandb")


@pytest.mark.parametrize(("bridge", "package"), [(WandB, "wandb"), (MLflow, "mlflow.tracking")])
def test_what_is_not_installed_is_said(
    bridge: Any, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with expect_error(UserError):
        bridge()


@pytest.mark.slow
def test_weights_and_biases(tmp_path: Path) -> None:
    if importlib.util.find_spec("wandb") is None:
        pytest.skip("wandb is not installed")
    # In a separate process: wandb leaves threads behind.
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    command = [sys.executable, __file__, str(tmp_path)]
    ended = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=200
    )
    assert ended.returncode == 0, ended.stderr
    runs = [path.name for path in (tmp_path / "wandb").glob("offline-run-*")]
    assert len(runs) == 2
    (name,) = {name.rpartition("-")[2] for name in runs}
    assert (tmp_path / "wandb.id").read_text().strip() == name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # those of mlflow
def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        client = importlib.import_module("mlflow.tracking").MlflowClient
    except ImportError:
        pytest.skip("mlflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    place = f"file://{tmp_path}/mlflow"
    for steps in (3, 6):
        bridge = MLflow("tests", tracking_uri=place, params={"rows": 56}, every_steps=1)
        fit(tmp_path / "run", steps, bridge, Samples(make_samples, to=[bridge]))
    there = client(place)
    (run,) = there.search_runs([there.get_experiment_by_name("tests").experiment_id])
    points = there.get_metric_history(run.info.run_id, "loss")
    assert sorted(point.step for point in points) == [1, 2, 3, 4, 5, 6]
    points = there.get_metric_history(run.info.run_id, "validation/loss")
    assert sorted(point.step for point in points) == [3, 6]
    assert run.info.status == "FINISHED"
    assert os.path.basename(there.list_artifacts(run.info.run_id)[0].path) == "image"  # noqa: PTH119


if __name__ == "__main__":
    for until in (3, 6):
        to_wandb = WandB(project="tests", mode="offline", every_steps=1)
        fit(Path(sys.argv[1]), until, to_wandb, Samples(make_samples, to=[to_wandb]))
