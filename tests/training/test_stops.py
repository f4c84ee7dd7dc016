"""Stops: the first reason counts; limits, signals, callbacks and threads request stops."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import front_door
from support.messages import expect_error
from support.runs import command, inspected, run
from support.small import DATA, Small, loss
from torch import nn
from torch.utils.data import TensorDataset

import quorate

MANY = TensorDataset(torch.randn(20_000, 6), torch.randn(20_000, 1))  # 80 s of evaluation


def slow(model: nn.Module, batch: Any) -> torch.Tensor:
    time.sleep(0.01)
    return loss(model, batch)


def slow_rows(model: nn.Module, batch: Any) -> torch.Tensor:
    time.sleep(0.01)
    return model(batch[0])


def slow_trainer(run_dir: Path, **options: Any) -> quorate.Trainer:
    settings: dict[str, Any] = {"workers": 2, "shards": 4, "batch_size": 12} | options
    return front_door.trainer(
        Small, slow, optimizer=torch.optim.Adam, devices="cpu", run_dir=run_dir, **settings
    )


def test_a_run_ends_at_its_time_limit_and_the_next_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limit_s = 0.2  # less than a start takes: the limit counts from the first shard on
    run = slow_trainer(tmp_path)
    run.fit(DATA, steps=1_000_000, max_time_s=limit_s)
    steps = run.global_step
    assert 0 < steps < 1_000_000
    out = capsys.readouterr().out
    assert f"stopped after step {steps:,}: max_time_s={limit_s} has passed" in out
    assert f"saved step {steps:,}" in out
    slow_trainer(tmp_path).fit(DATA, steps=steps + 3, max_time_s=3600.0)  # does not wait an hour
    assert inspected(tmp_path)["global_step"] == steps + 3


class Acts(quorate.Callback):
    """Acts after an update, and notes the saves and the reason for the end of the run."""

    def __init__(self, at: int, act: Callable[[Any], object]) -> None:
        self.at, self.act, self.updates = at, act, 0
        self.saves, self.reasons = list[int](), list[str]()

    def started(self, trainer: Any) -> None:
        self.trainer = trainer
        if self.at == 0:
            self.act(trainer)

    def updated(self, report: quorate.Report) -> None:
        self.updates += 1
        if report.global_step == self.at:
            self.act(self.trainer)

    def saved(self, global_step: int, path: Path) -> None:
        assert json.loads((path / "state.json").read_text())["global_step"] == global_step
        self.saves.append(global_step)

    def stopped(self, reason: str) -> None:
        self.reasons.append(reason)


def test_sigusr1_saves_and_goes_on(tmp_path: Path) -> None:
    signals = Acts(5, lambda _: os.kill(os.getpid(), signal.SIGUSR1))
    before = signal.getsignal(signal.SIGUSR1)
    slow_trainer(tmp_path).fit(DATA, steps=12, callbacks=[signals])
    assert signals.saves == [5, 12]
    assert signal.getsignal(signal.SIGUSR1) is before


@pytest.mark.parametrize(("update", "more"), [("sync", 0), ("quorum:3", 0), ("async", 3)])
def test_the_first_reason_counts_and_no_update_follows(
    update: str, more: int, tmp_path: Path
) -> None:
    """Under async each computed shard is an update."""

    def ask_twice(trainer: Any) -> None:
        trainer.stop("first")
        trainer.stop("second")

    for at in (0, 3):
        acts, run = Acts(at, ask_twice), slow_trainer(tmp_path / str(at), update=update)
        run.fit(DATA, steps=50, callbacks=[acts])
        assert acts.reasons == ["first"]
        assert at <= run.global_step <= at + more
        assert acts.updates == run.global_step
    for report in run.updates(DATA, steps=50):
        if report.global_step == 6:
            run.stop()
    assert 6 <= run.global_step <= 7 + more


def test_a_stop_during_an_evaluation_ends_it_and_the_next_run_makes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = slow_trainer(tmp_path)
    timer = threading.Timer(0.3, run.stop, ("somebody's wish",))
    wish = Acts(5, lambda _: timer.start())
    before = time.monotonic()
    run.fit(DATA, steps=5, validation=MANY, callbacks=[wish])
    timer.join()
    assert time.monotonic() - before < 60.0
    assert "validation" not in capsys.readouterr().out
    assert run.global_step == 5
    slow_trainer(tmp_path).fit(DATA, steps=5, validation=DATA)
    out = capsys.readouterr().out
    assert "nothing to do: 5 of 5" in out
    assert "epoch 1: validation" in out
    slow_trainer(tmp_path).fit(DATA, steps=5, validation=DATA)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert sum("validation" in line for line in lines) == 1  # once, and not again


def test_stop_ends_an_evaluation_and_a_prediction(tmp_path: Path) -> None:
    run = slow_trainer(tmp_path / "run")
    run.fit(DATA, steps=1)
    ways: list[tuple[str, Callable[[], object]]] = [
        ("evaluate", lambda: run.evaluate(MANY)),
        ("predict", lambda: run.predict(MANY, slow_rows, to=tmp_path / "to")),
    ]
    for name, call in ways:
        timer = threading.Timer(0.3, run.stop, ("somebody's wish",))
        timer.start()
        before = time.monotonic()
        with expect_error(quorate.UserError, name=name):
            call()
        assert time.monotonic() - before < 60.0
        timer.join()
    assert not (tmp_path / "to").exists()
    run.stop()  # nothing is under way
    assert run.evaluate(DATA)["loss"] > 0


@pytest.mark.parametrize("how", ["processes", "collective"])
def test_processes_of_user_code_end_by_sigterm(how: str, tmp_path: Path) -> None:
    """Signals of user code's processes are their own, also in a rank, and no request to stop."""
    options, found = ("--engine", how, "--workers", "2"), tmp_path / "found"
    ended = run(command("children_of_user_code.py", options=options), {"FOUND": str(found)})
    assert ended.code == 0, ended.said
    assert "left: nobody" in ended.out
    lines = [json.loads(line) for line in found.read_text().splitlines()]
    of_python = ["default_int_handler", *3 * ["SIG_DFL"], "-1"]
    assert {who for who, *_ in lines} == {"callback", "dataset"}
    assert all(rest == [of_python, -signal.SIGTERM] for _, *rest in lines), lines
