"""What runs beside training: stops, services, evaluations, callbacks, a guard before updates."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support import front_door
from support.digests import digest_of
from support.small import DATA, Small, loss, trainer
from torch import nn
from torch.utils.data import TensorDataset

import quorate
from quorate.errors import CheckpointError, NotFiniteError, SettingError
from quorate.services.checkpoints import files
from quorate.services.report import Report
from quorate.services.supervisor import Supervisor
from quorate.training.stop import Stops

# --- stops ----------------------------------------------------------------------------------------


def test_the_first_reason_counts_and_listeners_come_and_go() -> None:
    stops, heard = Stops(), []
    with stops.telling(heard.append):
        stops.ask("first")
        stops.ask("second")
    stops.ask("third")
    with stops.telling(heard.append):
        pass
    assert stops.reason == "first"
    assert heard == ["first", "first", "first"]


def test_a_time_limit_asks_and_a_short_run_does_not_wait_for_it() -> None:
    stops = Stops()
    with stops.after(0.05, "the limit"):
        time.sleep(0.2)
    assert stops.reason == "the limit"
    before = time.monotonic()
    with Stops().after(3600.0, "never"):
        pass
    assert time.monotonic() - before < 60.0  # of 3600


def slow(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    time.sleep(0.01)
    return loss(model, batch)


def slow_trainer(run_dir: Path, **options: Any) -> quorate.Trainer:
    settings: dict[str, Any] = {"workers": 2, "shards": 4, "batch_size": 12} | options
    return front_door.trainer(
        Small, slow, optimizer=torch.optim.Adam, devices="cpu", run_dir=run_dir, **settings
    )


def test_a_run_ends_at_its_time_limit_and_the_next_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    began = time.monotonic()
    slow_trainer(tmp_path / "first").fit(DATA, steps=1)
    limit_s = 2 * (time.monotonic() - began) + 1  # a start takes as long as the machine is busy
    run = slow_trainer(tmp_path)
    run.fit(DATA, steps=1_000_000, max_time_s=limit_s)
    assert 0 < run.global_step < 1_000_000
    out = capsys.readouterr().out
    assert f"stopped after step {run.global_step:,}: max_time_s={limit_s} is over" in out
    assert f"saved step {run.global_step:,}" in out
    again = slow_trainer(tmp_path)
    again.fit(DATA, steps=run.global_step + 3)
    whole = slow_trainer(tmp_path / "whole", workers=1)
    whole.fit(DATA, steps=run.global_step + 3)
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            again.model.state_dict().values(), whole.model.state_dict().values(), strict=True
        )
    )


def test_sigusr1_saves_and_goes_on(tmp_path: Path) -> None:
    saved: list[int] = []

    class Signalling(quorate.Callback):
        def updated(self, report: Report) -> None:
            if report.global_step == 5:
                os.kill(os.getpid(), signal.SIGUSR1)

        def saved(self, global_step: int, path: Path) -> None:
            assert files.check(path, global_step)["global_step"] == global_step
            saved.append(global_step)

    before = signal.getsignal(signal.SIGUSR1)
    slow_trainer(tmp_path).fit(DATA, steps=12, callbacks=[Signalling()])
    assert saved == [5, 12]
    assert signal.getsignal(signal.SIGUSR1) is before


def test_a_stop_during_an_evaluation_ends_it_and_the_next_run_makes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    many = TensorDataset(torch.randn(20_000, 6), torch.randn(20_000, 1))
    run = slow_trainer(tmp_path)

    class Wish(quorate.Callback):
        def updated(self, report: Any) -> None:
            if report.global_step == 5:
                timer.start()

    timer = threading.Timer(0.5, run.stop, ("somebody's wish",))
    before = time.monotonic()
    run.fit(DATA, steps=5, validation=many, callbacks=[Wish()])  # evaluating takes 80 s
    timer.join()
    assert time.monotonic() - before < 60.0
    assert "validation" not in capsys.readouterr().out
    assert run.global_step == 5
    again = slow_trainer(tmp_path)
    again.fit(DATA, steps=5, validation=DATA)
    out = capsys.readouterr().out
    assert "nothing to do: 5 of 5" in out
    assert "epoch 1: validation" in out
    slow_trainer(tmp_path).fit(DATA, steps=5, validation=DATA)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert sum("validation" in line for line in lines) == 1  # once, and not again


def test_a_stop_before_the_first_update_ends_the_run(tmp_path: Path) -> None:
    class Impatient(quorate.Callback):
        def started(self, trainer: Any) -> None:
            trainer.stop("enough")

    run = slow_trainer(tmp_path)
    run.fit(DATA, steps=50, callbacks=[Impatient()])
    assert run.global_step <= 1  # that was under way


# --- services -------------------------------------------------------------------------------------


class Counting:
    """A service that notes what it is told, and fails on demand."""

    name = "counting"
    every_s = 0.05

    def __init__(self, *, fails: bool) -> None:
        self.fails = fails
        self.ticks, self.updates, self.closed = 0, 0, False

    def updated(self, report: Report) -> None:
        self.updates += 1

    def evaluated(self, global_step: int, metrics: dict[str, float]) -> None:
        pass

    def tick(self) -> None:
        self.ticks += 1
        assert threading.current_thread().name == "quorate-counting"
        if self.fails:
            raise ValueError("it cannot")

    def close(self) -> None:
        self.closed = True


def test_a_service_that_fails_is_said_once_and_goes_on_being_tried() -> None:
    said: list[str] = []
    fine, failing = Counting(fails=False), Counting(fails=True)
    with Supervisor([fine, failing], said.append):
        time.sleep(0.4)
    assert fine.ticks >= 4
    assert failing.ticks >= 4
    assert said == ["counting failed, training goes on: ValueError: it cannot"]
    assert fine.closed
    assert failing.closed


# --- evaluations, the best checkpoint, callbacks --------------------------------------------------


class Notes(quorate.Callback):
    def __init__(self) -> None:
        self.said: list[Any] = []

    def started(self, trainer: Any) -> None:
        self.trainer = trainer
        self.said.append(("started", trainer.global_step))

    def updated(self, report: Report) -> None:
        self.said.append(report.global_step)

    def evaluated(self, global_step: int, metrics: dict[str, float]) -> None:
        self.said.append(("evaluated", global_step, round(metrics["loss"], 6)))

    def stopped(self, reason: str) -> None:
        self.said.append(("stopped", reason))


def test_callbacks_are_told_in_order() -> None:
    notes = Notes()
    run = trainer(None)
    run.fit(
        DATA,
        callbacks=[notes],
        steps=5,
        validation=quorate.Validation(DATA, every_steps=2),
    )
    plain = [entry for entry in notes.said if not isinstance(entry, tuple) or len(entry) == 2]
    assert plain == [("started", 0), 1, 2, 3, 4, 5, ("stopped", "all steps are done")]
    evaluated = [entry[1] for entry in notes.said if isinstance(entry, tuple) and len(entry) == 3]
    assert evaluated == [2, 4, 5]


def test_early_stopping_is_a_callback() -> None:
    class EarlyStopping(Notes):
        def evaluated(self, global_step: int, metrics: dict[str, float]) -> None:
            if global_step >= 4:
                self.trainer.stop("no better for long")

    notes = EarlyStopping()
    run = trainer(None)
    run.fit(
        DATA,
        callbacks=[notes],
        epochs=50,
        validation=quorate.Validation(DATA, every_steps=2),
    )
    assert run.global_step in (4, 5)
    assert notes.said[-1] == ("stopped", "no better for long")


def test_an_exception_in_a_callback_ends_the_run_with_the_state_saved(tmp_path: Path) -> None:
    class Failing(Notes):
        def updated(self, report: Report) -> None:
            if report.global_step == 3:
                raise LookupError("the user's")

        def stopped(self, reason: str) -> None:
            super().stopped(reason)
            raise OSError("later")  # the first exception is the one that is raised

    notes = Failing()
    with pytest.raises(LookupError, match="the user's"):
        trainer(tmp_path).fit(DATA, epochs=2, callbacks=[notes])
    found = files.find(tmp_path)
    assert found is not None
    assert found.record["global_step"] == 3
    assert notes.said[-1] == ("stopped", "LookupError: the user's")


def test_the_best_checkpoint_stays(tmp_path: Path) -> None:
    values = iter([0.3, 0.9, 0.5, 0.7, 0.8, 0.6, 0.4, 0.2])

    def scored(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"loss": loss(model, batch), "score": torch.tensor(score)}

    score = next(values)

    class Next(quorate.Callback):
        def evaluated(self, global_step: int, metrics: dict[str, float]) -> None:
            nonlocal score
            score = next(values, 0.0)

    def run(steps: int) -> None:
        one = quorate.Trainer(
            Small,
            scored,
            optimizer=torch.optim.Adam,
            batch_size=12,
            shards=4,
            devices="cpu",
            run_dir=quorate.RunDir(tmp_path, keep=2, save_every_steps=1),
        )
        one.fit(
            DATA,
            callbacks=[Next()],
            steps=steps,
            validation=quorate.Validation(DATA, every_steps=1, best="max:score"),
        )

    run(4)
    run(8)
    there = [one.global_step for one in files.listing(tmp_path)]
    assert there == [8, 7, 2]
    found = files.find(tmp_path)
    assert found is not None
    assert found.record["account"]["best"] == {
        "metric": "score",
        "value": pytest.approx(0.9),
        "global_step": 2,
    }


@pytest.mark.parametrize("best", ["accuracy", "max:", "more:loss"])
def test_a_best_that_is_none_is_refused(best: str) -> None:
    with pytest.raises(SettingError, match="best: got"):
        trainer(None).fit(
            DATA,
            validation=quorate.Validation(DATA, best=best),
        )
    with pytest.raises(SettingError, match=r"best: got .*, expected Validation\(best=\)"):
        trainer(None).fit(DATA, best="min:loss")
    with pytest.raises(SettingError, match="best: got 'speed', expected one of loss"):
        trainer(None).fit(
            DATA,
            steps=1,
            validation=quorate.Validation(DATA, best="max:speed"),
        )


# --- a guard before each update -------------------------------------------------------------------


class Poisoned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x))


def with_marks(*marks: tuple[int, int]) -> TensorDataset:
    x = torch.randn(48, 6, generator=torch.Generator().manual_seed(0))
    mark = torch.zeros(48, 1)
    for row, kind in marks:
        mark[row] = kind
    return TensorDataset(x, mark)


def poisoned_trainer(run_dir: Path | None, **options: Any) -> quorate.Trainer:
    return front_door.trainer(
        Poisoned,
        options.pop("loss"),
        optimizer=quorate.Optimize(
            lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
            schedule=lambda opt: torch.optim.lr_scheduler.ExponentialLR(opt, 0.9),
            ema_decay=0.9,
        ),
        batch_size=8,
        shards=4,
        devices="cpu",
        run_dir=run_dir,
        **options,
    )


def infinite(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    x, mark = batch
    y = model(x)
    return (
        y.square().mean()
        + (torch.where(mark == 2, torch.inf, 0.0) * y.abs())
        .nan_to_num(nan=0.0, posinf=torch.inf)
        .sum()
    )


def root_at_zero(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Finite, with a gradient that is not: the slope of a root at zero."""
    x, mark = batch
    y = model(x)
    return y.square().mean() + (y * 0.0 * (mark == 1) + (mark != 1)).sqrt().sum() * 1e-3


@pytest.mark.parametrize(
    ("make", "kind", "what"),
    [
        (root_at_zero, 1, "the gradient of first.weight, first.bias, last.weight, last.bias"),
        (infinite, 2, "the gradient of first.weight, first.bias, last.weight, last.bias"),
    ],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_an_update_that_is_not_finite_is_not_made(
    make: Any, kind: int, what: str, workers: int, tmp_path: Path
) -> None:
    data = with_marks((21, kind))  # step 2, shard 2: rows 20 and 21
    run = poisoned_trainer(tmp_path, loss=make, workers=workers)
    with pytest.raises(NotFiniteError) as caught:
        run.fit(data, epochs=2, shuffle=False)
    said = str(caught.value)
    assert said.startswith(f"{what} is not finite in step 2: shard 2 (worker ")
    assert "rows 20, 21" in said or "rows [20, 21]" in said
    assert said.count("shard") == 1
    assert run.global_step == 2
    found = files.find(tmp_path)
    assert found is not None
    assert found.record["global_step"] == 2
    assert all(bool(value.isfinite().all()) for value in run.model.state_dict().values())


@pytest.mark.parametrize("workers", [1, 2])
def test_infinities_in_a_buffer_are_the_models_own_affair(workers: int) -> None:
    class Masked(Poisoned):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))

    run = quorate.Trainer(
        Masked, loss, optimizer=torch.optim.Adam, batch_size=12, shards=4, devices="cpu",
        workers=workers,
    )  # fmt: skip
    run.fit(DATA, steps=4)
    assert run.global_step == 4
    assert torch.equal(run.model.mask, torch.full((3, 3), -torch.inf).triu(1))


@pytest.mark.parametrize("update", ["sync", "async"])
def test_skipping_leaves_the_state_and_goes_on(update: str, tmp_path: Path) -> None:
    """Against a run over the same rows in which that step's gradient was never applied."""
    data = with_marks((9, 1), (30, 1))
    options = {"loss": root_at_zero, "nonfinite": "skip", "update": update, "workers": 1}
    run = poisoned_trainer(tmp_path, **options)
    run.fit(data, steps=4, shuffle=False)
    again = poisoned_trainer(tmp_path, **options)  # the count and the schedule go on
    again.fit(data, epochs=1, shuffle=False)

    plain = Poisoned()
    start = poisoned_trainer(None, **options).model.state_dict()
    plain.load_state_dict({k: v.clone() for k, v in start.items()})
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01, momentum=0.9)
    size = 8 if update == "sync" else 2
    for n, first in enumerate(range(0, 48, size)):
        rows = slice(first, first + size)
        x, mark = data.tensors[0][rows], data.tensors[1][rows]
        optimizer.param_groups[0]["lr"] = 0.01 * 0.9**n
        optimizer.zero_grad()
        total = sum(
            root_at_zero(plain, [x[k : k + 2], mark[k : k + 2]]) * 2 for k in range(0, size, 2)
        )
        (total / size).backward()
        if mark.sum() == 0:
            optimizer.step()
    for name, value in plain.state_dict().items():
        assert torch.allclose(again.model.state_dict()[name], value, atol=1e-6), name
    assert again.global_step == 48 // size
    found = files.find(tmp_path)
    assert found is not None
    assert found.record["account"]["not_finite"] == 2


def test_another_choice_is_refused() -> None:
    with pytest.raises(SettingError, match="nonfinite: got 'ignore', expected stop or skip"):
        trainer(None, nonfinite="ignore")


# --- beginning: afresh, or from weights -----------------------------------------------------------


def test_fresh_moves_the_old_run_aside(tmp_path: Path) -> None:
    for number in (1, 2):
        run = trainer(tmp_path, fresh=True)
        run.fit(DATA, steps=3 * number)
        assert run.global_step == 3 * number
    aside = tmp_path / "aside-1"
    old, new = files.find(aside), files.find(tmp_path)
    assert old is not None
    assert new is not None
    assert (old.record["global_step"], new.record["global_step"]) == (3, 6)
    assert len((aside / "metrics.jsonl").read_text().splitlines()) == 3
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 6
    trainer(tmp_path).fit(DATA, steps=7)
    assert not (tmp_path / "aside-2").exists()


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod."])
@pytest.mark.parametrize("kind", ["pt", "nested", "safetensors"])
def test_weights_of_plain_torch_are_a_beginning(prefix: str, kind: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    torch.manual_seed(9)
    source = Small()
    named = {prefix + name: value for name, value in source.state_dict().items()}
    path = tmp_path / f"weights.{'safetensors' if kind == 'safetensors' else 'pt'}"
    if kind == "safetensors":
        save_file(named, path)
    else:
        torch.save(named if kind == "pt" else {"epoch": 3, "state_dict": named}, path)
    run = trainer(None, init_from=path)
    for name, value in run.model.state_dict().items():
        assert torch.equal(value, source.state_dict()[name])


def test_weights_of_a_run_are_a_beginning(tmp_path: Path) -> None:
    first = trainer(tmp_path / "first")
    first.fit(DATA, steps=3)
    second = trainer(tmp_path / "second", init_from=tmp_path / "first")
    for name, value in second.model.state_dict().items():
        assert torch.equal(value, first.model.state_dict()[name])
    second.fit(DATA, steps=2)
    assert second.global_step == 2
    resumed = trainer(tmp_path / "second", init_from=tmp_path / "first")
    resumed.fit(DATA, steps=4)
    whole = trainer(tmp_path / "whole", init_from=tmp_path / "first", workers=1)
    whole.fit(DATA, steps=4)
    assert digest_of(resumed) == digest_of(whole)


def test_weights_that_do_not_fit_are_named_with_both_shapes(tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    torch.save({"first.weight": torch.zeros(2, 2), "extra": torch.zeros(1)}, path)
    with pytest.raises(CheckpointError) as caught:
        trainer(None, init_from=path)
    said = str(caught.value)
    assert "first.weight: the file has (2, 2), the model (8, 6)" in said
    assert "extra: the file has (1,), the model no such tensor" in said
    torch.save(Small(), path)  # a pickle of a class: nothing in it is run
    with pytest.raises(CheckpointError, match=r"weights of .*w.pt: got .*; expected a .safet"):
        trainer(None, init_from=path)
    with pytest.raises(CheckpointError, match=r"nothing.pt: got .*No such file"):
        trainer(None, init_from=tmp_path / "nothing.pt")
    path.write_bytes(b"no weights")
    with pytest.raises(CheckpointError, match="expected a"):
        trainer(None, init_from=path)
