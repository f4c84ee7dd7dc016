"""Stops: the first reason counts; limits, signals and callbacks ask for one."""

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
from support.small import DATA, Small, loss
from torch import nn
from torch.utils.data import TensorDataset

import quorate
from quorate.services.checkpoints import files
from quorate.services.report import Report
from quorate.training.stop import Stops


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
    stops, asked = Stops(), threading.Event()
    with stops.telling(lambda reason: asked.set()), stops.after(0.05, "the limit"):
        assert asked.wait(60)
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
