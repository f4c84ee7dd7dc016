"""The end of training: early and immediate stops; best weights; names checked beforehand."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support import front_door, small
from support.digests import digest
from support.fits import Calls
from support.messages import expect_error
from support.runs import inspected
from torch.utils.data import TensorDataset

import quorate
from quorate.callbacks import EarlyStopping, ReduceLROnPlateau
from quorate.errors import CheckpointError, SettingError

# Targets that move the model away from these targets.
OTHER = TensorDataset(small.DATA.tensors[0][:20], -small.DATA.tensors[1][:20])
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def loss(model: torch.nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    error = model(batch[0]) - batch[1]
    return {"loss": error.square().mean(), "distance": error.abs().mean()}


def trainer(run_dir: Path | None = None, workers: int = 2, **options: Any) -> quorate.Trainer:
    defaults: dict[str, Any] = {"optimizer": SGD, "batch_size": 12, "shards": 4, "loss": loss}
    settings = {**defaults, "run_dir": run_dir, "devices": "cpu", "workers": workers, **options}
    return front_door.trainer(small.Small, **settings)


def fit(
    run_dir: Path | None, workers: int, steps: int, **options: Any
) -> tuple[quorate.Trainer, EarlyStopping]:
    made, early = trainer(run_dir, workers, **options), EarlyStopping(patience=3)
    made.fit(
        small.DATA,
        steps=steps,
        validation=quorate.Validation(OTHER, every_steps=2, best="min:loss"),
        callbacks=[early, ReduceLROnPlateau("distance", patience=0, factor=0.5, cooldown=1)],
    )
    return made, early


def values(made: quorate.Trainer) -> str:
    return digest(made.weights().items())


def test_early_stopping_and_plateau_resume_exactly_and_load_finds_weights(tmp_path: Path) -> None:
    whole, early = fit(tmp_path / "whole", 1, 60, ema_decay=0.8)
    assert 8 <= whole.global_step < 60
    assert early.best_step == whole.global_step - 6
    assert whole.param_groups[0]["lr"] < 0.05
    parts = tmp_path / "parts"
    for workers, steps in ((2, 4), (3, early.best_step), (1, 60)):
        assert steps is not None
        again, resumed = fit(parts, workers, steps, ema_decay=0.8)
    assert again.global_step == whole.global_step
    assert (resumed.best, resumed.best_step) == (early.best, early.best_step)
    assert again.param_groups[0]["lr"] == whole.param_groups[0]["lr"]
    assert values(again) == values(whole)
    # The weights are the best weights, and training does not go on.
    more, _ = fit(parts, 2, 60, ema_decay=0.8)
    assert more.global_step == whole.global_step
    assert values(more) == (best := values(whole))
    # Weights by name and by path; a script that only predicts.
    newest = more.load("newest")
    assert newest.name == f"step-{more.global_step:012d}"
    assert values(more) != best
    more.load(parts / "checkpoints" / f"step-{early.best_step:012d}")
    assert values(more) == best
    other = trainer(parts, 1, ema_decay=0.8)
    assert other.load("best").name == f"step-{early.best_step:012d}"
    assert torch.equal(other.predict(OTHER), more.predict(OTHER))
    assert other.evaluate(OTHER)["loss"] == early.best


def test_load_says_what_is_not_there(tmp_path: Path) -> None:
    with expect_error(SettingError, name="load", got="best"):
        trainer().load("best")
    with expect_error(CheckpointError, name="load"):
        trainer(tmp_path).load("newest")
    made = trainer(tmp_path)
    made.fit(small.DATA, steps=2)
    with expect_error(CheckpointError, name="load"):
        made.load("best")
    newest = made.load("newest")
    (newest / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(CheckpointError):
        made.load(newest)


def test_the_best_checkpoint_stays(tmp_path: Path) -> None:
    scores = [0.3, 0.9, 0.5, 0.7, 0.8, 0.6, 0.4, 0.2]
    following = Calls(evaluated=lambda *_: scores.pop(0))

    def scored(model: torch.nn.Module, batch: Any) -> dict[str, Any]:
        return {**loss(model, batch), "score": torch.tensor(scores[0])}

    validation = quorate.Validation(small.DATA, every_steps=1, best="max:score")
    for steps in (4, 8):
        made = trainer(tmp_path, loss=scored, keep=2, save_every_steps=1)
        made.fit(small.DATA, steps=steps, validation=validation, callbacks=[following])
        scores.append(0.0)
    facts = inspected(tmp_path)
    assert [one["global_step"] for one in facts["checkpoints"]] == [8, 7, 2]
    best = {"metric": "score", "value": pytest.approx(0.9), "global_step": 2}
    assert facts["account"]["best"] == best


NEEDED: dict[str, dict[str, Any]] = {
    "best without a direction": {"validation": {"best": "accuracy"}},
    "best in the wrong place": {"best": "min:loss"},
    "callback": {"validation": {}, "callbacks": [EarlyStopping("f1", mode="max")]},
    "no validation": {"callbacks": [EarlyStopping()]},
    "two of a name": {"validation": {}, "callbacks": [EarlyStopping(), EarlyStopping("distance")]},
}


@pytest.mark.parametrize("case", NEEDED)
def test_metrics_are_looked_for_before_the_first_update(tmp_path: Path, case: str) -> None:
    made, options = trainer(tmp_path), dict(NEEDED[case])
    with expect_error(SettingError):
        if "validation" in options:
            options["validation"] = quorate.Validation(OTHER, **options["validation"])
        made.fit(small.DATA, epochs=1, **options)
    assert made.global_step == 0
    assert not (tmp_path / "checkpoints").exists()


def test_a_metric_of_the_schedule_is_looked_for_too() -> None:
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    made = trainer(schedule=plateau, schedule_metric="validation/los")
    with expect_error(SettingError, name="schedule_metric", got="los"):
        made.fit(small.DATA, epochs=1, validation=OTHER)
    assert made.global_step == 0
    with expect_error(SettingError, name="ReduceLROnPlateau", got="a schedule"):
        small.trainer(None).fit(small.DATA, validation=OTHER, callbacks=[ReduceLROnPlateau()])


class Keeps(quorate.Callback):
    """A callback with a state of several kinds."""

    def __init__(self, name: str | None = None) -> None:
        self.name = name
        self.seen: dict[str, Any] = {"steps": [], "count": torch.zeros(3, dtype=torch.float64)}

    def updated(self, report: quorate.Report) -> None:
        self.seen["steps"].append(report.global_step)
        self.seen["count"] += 1

    def state_dict(self) -> dict[str, Any]:
        return self.seen

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state


def test_what_a_callback_keeps_is_in_the_checkpoint(tmp_path: Path) -> None:
    trainer(tmp_path).fit(small.DATA, steps=3, callbacks=[Keeps("a"), Keeps("b")])
    # The state of a missing callback is kept on; a new callback begins empty.
    trainer(tmp_path).fit(small.DATA, steps=5, callbacks=[Keeps("b"), Keeps()])
    last = [Keeps("a"), Keeps("b"), Keeps()]
    trainer(tmp_path).fit(small.DATA, steps=6, callbacks=last)
    expected = [[1, 2, 3, 6], [1, 2, 3, 4, 5, 6], [4, 5, 6]]
    assert [each.seen["steps"] for each in last] == expected
    assert [each.seen["count"].tolist() for each in last] == [3 * [len(n)] for n in expected]
    last[0].seen["what"] = object()
    with expect_error(CheckpointError, name="state_dict() of a callback"):
        trainer(tmp_path / "other").fit(small.DATA, steps=2, callbacks=last[:1])
