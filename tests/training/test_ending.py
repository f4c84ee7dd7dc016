"""The end of training: stops, early and at once; best weights; names that are looked for before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import front_door, small
from support.messages import expect_error
from torch.utils.data import TensorDataset

import quorate
from quorate.callbacks import EarlyStopping, LearningRateMonitor, ReduceLROnPlateau
from quorate.errors import CheckpointError, SettingError
from quorate.replica.fingerprint import fingerprint

# What the model is trained towards gets it away from these.
OTHER = TensorDataset(small.DATA.tensors[0][:20], -small.DATA.tensors[1][:20])


def loss(model: torch.nn.Module, batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    error = model(batch[0]) - batch[1]
    return {"loss": error.square().mean(), "distance": error.abs().mean()}


def trainer(run_dir: Path | None = None, workers: int = 2, **options: Any) -> quorate.Trainer:
    defaults: dict[str, Any] = {
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
        "batch_size": 12,
        "shards": 4,
    }
    return front_door.trainer(
        small.Small, loss, run_dir=run_dir, devices="cpu", workers=workers, **defaults | options
    )


class StopAfter(quorate.Callback):
    def __init__(self, step: int) -> None:
        self._step = step

    def started(self, trainer: Any) -> None:
        self._trainer = trainer
        self.updated_at = list[int]()
        if self._step == 0:
            trainer.stop("before any")

    def updated(self, report: quorate.Report) -> None:
        self.updated_at.append(report.global_step)
        if report.global_step == self._step:
            self._trainer.stop("enough")


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("update", ["sync", "quorum:3"])
@pytest.mark.parametrize("step", [0, 1, 3])
def test_a_stop_between_updates_is_followed_by_none(workers: int, update: str, step: int) -> None:
    made, callback = trainer(workers=workers, update=update), StopAfter(step)
    made.fit(small.DATA, epochs=3, callbacks=[callback])
    assert made.global_step == step
    assert callback.updated_at == list(range(1, step + 1))


@pytest.mark.parametrize("update", ["async", "bounded:2"])
def test_under_async_shards_that_are_computed_are_one_update_each(update: str) -> None:
    made = trainer(workers=2, update=update)
    made.fit(small.DATA, epochs=3, callbacks=[StopAfter(3)])
    assert 3 <= made.global_step <= 5


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


def rates(made: quorate.Trainer) -> list[float]:
    return [group["lr"] for group in made.param_groups]


def values(made: quorate.Trainer) -> str:
    return fingerprint(made.weights())


@pytest.mark.parametrize("ema_decay", [pytest.param(None, marks=pytest.mark.slow), 0.8])
def test_early_stopping_and_plateau_resume_exactly(tmp_path: Path, ema_decay: float | None) -> None:
    optimize = quorate.Optimize(
        lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9), ema_decay=ema_decay
    )
    whole, early = fit(tmp_path / "whole", 1, 60, optimizer=optimize)
    assert 8 <= whole.global_step < 60
    assert early.best_step == whole.global_step - 6
    assert rates(whole)[0] < 0.05
    for workers, steps in ((2, 4), (3, early.best_step), (1, 60)):
        assert steps is not None
        again, resumed = fit(tmp_path / "parts", workers, steps, optimizer=optimize)
    assert again.global_step == whole.global_step
    assert (resumed.best, resumed.best_step) == (early.best, early.best_step)
    assert rates(again) == rates(whole)
    assert values(again) == values(whole)
    # The weights are the best ones, and it does not go on.
    assert again.evaluate(OTHER)["loss"] == early.best
    more, _ = fit(tmp_path / "parts", 2, 60, optimizer=optimize)
    assert more.global_step == whole.global_step
    assert values(more) == values(whole)


def test_load_best_newest_and_a_path(tmp_path: Path) -> None:
    optimize = quorate.Optimize(lambda params: torch.optim.SGD(params, lr=0.05), ema_decay=0.8)
    made, early = fit(tmp_path, 2, 60, optimizer=optimize)
    assert made.load("best").name == f"step-{early.best_step:012d}"
    best = values(made)
    assert made.evaluate(OTHER)["loss"] == early.best
    newest = made.load("newest")
    assert newest.name == f"step-{made.global_step:012d}"
    assert values(made) != best
    made.load(tmp_path / "checkpoints" / f"step-{early.best_step:012d}")
    assert values(made) == best
    # A script that only predicts.
    other = trainer(tmp_path, 1, optimizer=optimize)
    other.load("best")
    assert torch.equal(other.predict(OTHER), made.predict(OTHER))
    assert values(other) == best
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


NEEDED: dict[str, dict[str, Any]] = {
    "best": {"validation": quorate.Validation(OTHER, best="max:accuracy")},
    "callback": {"validation": OTHER, "callbacks": [EarlyStopping("f1", mode="max")]},
    "no validation": {"callbacks": [EarlyStopping()]},
    "two of a name": {
        "validation": OTHER,
        "callbacks": [EarlyStopping(), EarlyStopping("distance")],
    },
}


@pytest.mark.parametrize("case", NEEDED)
def test_metrics_are_looked_for_before_the_first_update(tmp_path: Path, case: str) -> None:
    made = trainer(tmp_path)
    with expect_error(SettingError):
        made.fit(small.DATA, epochs=1, **NEEDED[case])
    assert made.global_step == 0
    assert not (tmp_path / "checkpoints").exists()


def test_a_metric_of_the_schedule_is_looked_for_too() -> None:
    optimize = quorate.Optimize(
        lambda params: torch.optim.SGD(params, lr=0.1),
        schedule=torch.optim.lr_scheduler.ReduceLROnPlateau,
        schedule_metric="validation/los",
    )
    made = trainer(optimizer=optimize)
    with expect_error(SettingError, name="schedule_metric", got="los"):
        made.fit(small.DATA, epochs=1, validation=OTHER)
    assert made.global_step == 0


def test_a_total_that_needs_more_rows_is_no_mistake() -> None:
    def finish(values: torch.Tensor) -> float:
        if len(values) < len(OTHER):
            raise ValueError("too few rows")
        return float(values.median())

    def collected(model: torch.nn.Module, batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        return {**loss(model, batch), "median": (model(batch[0]) - batch[1]).abs()[:, 0]}

    made = front_door.trainer(
        small.Small,
        collected,
        totals={"median": quorate.Collect(finish)},
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        batch_size=12,
        shards=4,
        devices="cpu",
        workers=1,
    )
    validation = quorate.Validation(OTHER, best="min:median")
    made.fit(small.DATA, epochs=1, validation=validation, callbacks=[EarlyStopping("median")])
    assert made.global_step == 5


def test_nothing_is_written_where_there_is_nothing_to_do(tmp_path: Path) -> None:
    fit(tmp_path, 2, 4)

    def written() -> dict[str, tuple[int, int]]:
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        stats = {str(path): path.stat() for path in files if path.name != "run.lock"}
        return {name: (stat.st_mtime_ns, stat.st_ino) for name, stat in stats.items()}

    before = written()
    made, early = fit(tmp_path, 1, 4)
    assert written() == before
    assert made.global_step == 4
    assert early.best is not None


class Keeps(quorate.Callback):
    """A callback with a state of several kinds."""

    def __init__(self, name: str | None = None) -> None:
        self.name = name
        self.seen: dict[str, Any] = {"steps": [], "sum": torch.zeros(3, dtype=torch.float64)}

    def updated(self, report: quorate.Report) -> None:
        self.seen["steps"].append(report.global_step)
        self.seen["sum"] += report.loss

    def state_dict(self) -> dict[str, Any]:
        return self.seen

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state


def test_what_a_callback_keeps_is_in_the_checkpoint(tmp_path: Path) -> None:
    first = [Keeps("a"), Keeps("b")]
    trainer(tmp_path).fit(small.DATA, steps=3, callbacks=first)
    # One that is not there in between is kept on; a new one begins empty.
    trainer(tmp_path).fit(small.DATA, steps=5, callbacks=[Keeps("b"), Keeps()])
    last = [Keeps("a"), Keeps("b"), Keeps()]
    trainer(tmp_path).fit(small.DATA, steps=6, callbacks=last)
    assert [each.seen["steps"] for each in last] == [
        [1, 2, 3, 6],
        [1, 2, 3, 4, 5, 6],
        [4, 5, 6],
    ]
    whole = Keeps()
    trainer().fit(small.DATA, steps=6, callbacks=[whole])
    assert torch.equal(last[1].seen["sum"], whole.seen["sum"])


def test_a_state_that_cannot_be_saved_is_named(tmp_path: Path) -> None:
    keeps = Keeps()
    keeps.seen["what"] = object()
    with expect_error(CheckpointError, name="state_dict() of a callback"):
        trainer(tmp_path).fit(small.DATA, steps=2, callbacks=[keeps])


def test_a_plateau_and_a_schedule_do_not_go_together() -> None:
    made = small.trainer(None)
    with expect_error(SettingError, name="ReduceLROnPlateau", got="a schedule"):
        made.fit(small.DATA, epochs=1, validation=OTHER, callbacks=[ReduceLROnPlateau()])


BAD: dict[str, tuple[type[quorate.Callback], dict[str, Any]]] = {
    "mode": (EarlyStopping, {"mode": "less"}),
    "patience": (EarlyStopping, {"patience": 0}),
    "min_delta": (EarlyStopping, {"min_delta": -1.0}),
    "factor": (ReduceLROnPlateau, {"factor": 1.0}),
    "every_steps": (LearningRateMonitor, {"every_steps": 0}),
}


@pytest.mark.parametrize("name", BAD)
def test_settings_are_checked(name: str) -> None:
    kind, options = BAD[name]
    with expect_error(SettingError):
        kind(**options)
