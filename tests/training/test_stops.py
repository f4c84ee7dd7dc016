"""Stops: the first reason counts; limits, signals and callbacks ask for one."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import front_door
from support.messages import expect_error
from support.small import DATA, Small, loss
from support.warm import WARM
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
        assert not asked.wait(0.2)  # nothing is computed yet: workers start
        stops.begin()
        assert asked.wait(60)
    assert stops.reason == "the limit"
    before = time.monotonic()
    with Stops().after(3600.0, "never"):
        pass
    assert time.monotonic() - before < 60.0  # of 3600


def slow(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    time.sleep(0.01)
    return loss(model, batch)


def slow_rows(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    time.sleep(0.01)
    rows: torch.Tensor = model(batch[0])
    return rows


def slow_trainer(run_dir: Path, **options: Any) -> quorate.Trainer:
    settings: dict[str, Any] = {"workers": 2, "shards": 4, "batch_size": 12} | options
    return front_door.trainer(
        Small, slow, optimizer=torch.optim.Adam, devices="cpu", run_dir=run_dir, **settings
    )


def test_a_run_ends_at_its_time_limit_and_the_next_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limit_s = 0.2  # less than a start takes: it counts from the first shard on
    run = slow_trainer(tmp_path)
    run.fit(DATA, steps=1_000_000, max_time_s=limit_s)
    assert 0 < run.global_step < 1_000_000
    out = capsys.readouterr().out
    assert f"stopped after step {run.global_step:,}: max_time_s={limit_s} has passed" in out
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


@pytest.mark.parametrize("what", ["evaluate", "predict", "predict to a folder"])
def test_stop_ends_an_evaluation_and_a_prediction(what: str, tmp_path: Path) -> None:
    many = TensorDataset(torch.randn(20_000, 6), torch.randn(20_000, 1))
    run = slow_trainer(tmp_path / "run")
    run.fit(DATA, steps=1)
    ways: dict[str, Callable[[], object]] = {  # each takes 80 s
        "evaluate": lambda: run.evaluate(many),
        "predict": lambda: run.predict(many, slow_rows),
        "predict to a folder": lambda: run.predict(many, slow_rows, to=tmp_path / "to"),
    }
    timer = threading.Timer(0.5, run.stop, ("somebody's wish",))
    timer.start()
    before, name = time.monotonic(), what.partition(" ")[0]
    with expect_error(quorate.UserError, name=name):
        ways[what]()
    assert time.monotonic() - before < 60.0
    timer.join()
    assert not (tmp_path / "to").exists()
    run.stop()  # nothing is under way
    assert run.evaluate(DATA)["loss"] > 0


STUCK = """
import ctypes, os, resource, signal, threading, time
from quorate.training.stop import Signals, Stops

resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
mutex = ctypes.create_string_buffer(64)
lock = ctypes.CDLL(None).pthread_mutex_lock

def press():
    for _ in range(3):
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)

with Signals(Stops(), lambda: None) as signals:
    signals.under_way = True
    threading.Thread(target=press, daemon=True).start()
    lock(mutex)
    lock(mutex)  # never comes back, and takes no signal
"""


def test_signals_end_a_stuck_process_that_has_a_thousand_files_open() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 130, ended.stderr
    assert ended.stderr.splitlines() == ["quorate: signal 2 again, stopped at once"]


def test_a_run_ends_beside_a_fork_of_a_callback_and_sigterm_ends_the_fork(tmp_path: Path) -> None:
    begun: list[Any] = []

    class Forking(quorate.Callback):
        def updated(self, report: Any) -> None:
            process = multiprocessing.get_context("fork").Process(
                target=time.sleep, args=(600,), daemon=True
            )
            process.start()
            begun.append(process)

    slow_trainer(tmp_path, workers=1).fit(DATA, steps=1, callbacks=[Forking()])
    begun[0].terminate()
    begun[0].join(20)
    assert begun[0].exitcode == -signal.SIGTERM


@pytest.mark.slow
@pytest.mark.parametrize("how", ["towers --workers 1", "towers --workers 2", "processes"])
def test_processes_of_user_code_end_by_sigterm(how: str, tmp_path: Path) -> None:
    script = Path(__file__).parents[1] / "scripts" / "children_of_user_code.py"
    updates = os.environ.get("QUORATE_TEST_POOLS", "3")
    found = tmp_path / "found"
    code, out, err = WARM.run(
        ["run", "--engine", *how.split(), str(script), updates],
        {**os.environ, "FOUND": str(found)},
        300,
    )
    assert code == 0, out + err
    assert "left: nobody" in out
    of_python = ["default_int_handler", *3 * ["SIG_DFL"], "-1"]
    lines = [json.loads(line) for line in found.read_text().splitlines()]
    assert {who for who, _ in lines} == {"callback", "dataset"}
    for who, ended in lines:
        assert ended == {"handlers": of_python, "fork": -15, "program": -15}, who
