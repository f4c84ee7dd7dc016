"""Update rules over ends of loops, saves in the middle, evaluations, and a worker that hangs."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from support import front_door
from support.runs import command, run_all
from torch import nn
from torch.utils.data import TensorDataset

import quorate
from quorate.services.report import Report

ROWS, PER_EPOCH = 11, 12  # three batches of four shards
DATA = TensorDataset(torch.arange(ROWS), torch.linspace(-1, 1, ROWS).reshape(-1, 1))


def loss(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """With a metric whose sum has a digit to the base of 16 for each row."""
    time.sleep(random.uniform(0.0, 0.004))
    rows, x = batch
    return {
        "loss": (model(x) - 1).square().mean(),
        "rows": (16.0 ** rows.double()).mean(),
    }


def trainer(run_dir: Path | None = None, workers: int = 3, **options: Any) -> quorate.Trainer:
    settings: dict[str, Any] = {"update": "async", "ema_decay": 0.9} | options
    return front_door.trainer(
        lambda: nn.Linear(1, 1),
        loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05),
        batch_size=4,
        shards=4,
        devices="cpu",
        workers=quorate.Workers(workers, engine="towers"),
        run_dir=run_dir,
        **settings,
    )


def each_row_once(reports: list[Report], epochs: int) -> bool:
    total = sum(round(r.metrics["rows"] * r.rows) for r in reports)
    return f"{total:x}" == ROWS * f"{epochs:x}"


@pytest.mark.parametrize("update", ["async", "bounded:2"])
def test_a_save_in_the_middle_of_a_loop_is_where_another_trainer_goes_on(
    update: str, tmp_path: Path
) -> None:
    reports: list[Report] = []
    for report in (first := trainer(tmp_path, update=update)).updates(DATA, epochs=4):
        reports.append(report)
        if report.global_step == 17:
            first.save()
            break
    second = trainer(tmp_path, workers=2, update=update)
    reports += second.updates(DATA, epochs=4)
    assert second.global_step == len(reports)
    assert each_row_once(reports, 4)


def test_a_loop_that_is_left_goes_on_in_the_next() -> None:
    reports: list[Report] = []
    run = trainer()
    for stop_at in (5, 6, 30, 1000):
        for report in run.updates(DATA, epochs=5):
            reports.append(report)
            if report.global_step == stop_at:
                break
    assert each_row_once(reports, 5)
    assert [report.global_step for report in reports] == list(range(1, len(reports) + 1))


def test_averaged_weights_are_those_of_the_updates_in_their_order() -> None:
    run = trainer()
    shadow = [p.detach().double().clone() for p in run.model.parameters()]
    ages = Counter[int]()
    for report in run.updates(DATA, epochs=5):
        ages[report.staleness] += 1
        d = min(0.9, (1 + report.global_step) / (10 + report.global_step))
        for mine, parameter in zip(shadow, run.model.parameters(), strict=True):
            mine -= (1 - d) * (mine - parameter.detach().double())
    assert run.averaged_model is not None
    for mine, theirs in zip(shadow, run.averaged_model.parameters(), strict=True):
        assert torch.allclose(mine, theirs.detach().double(), atol=1e-6)
    assert sum(count for age, count in ages.items() if age) > 10


@pytest.mark.slow
def test_a_long_evaluation_gets_no_worker_killed_and_a_stopped_one_is_replaced() -> None:
    """The evaluation takes longer than ``worker_timeout_s``, the stopped worker for ever."""
    ended = run_all(
        {
            "evaluate": command("held_up.py", "evaluate", options=("--workers", "2")),
            "stop": command("held_up.py", "stop", options=("--workers", "2")),
        }
    )
    for name, one in ended.items():
        assert one.code == 0, one.said
        found = json.loads(one.out.splitlines()[-1])
        assert found["steps"] == 40
        replaced = [line for line in one.said.splitlines() if "another is starting" in line]
        assert len(replaced) == (name == "stop"), one.said
    assert "no answer for" in ended["stop"].said
