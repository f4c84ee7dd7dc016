"""The first lines of a run: what the machine has too little of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support import front_door
from torch import nn
from torch.utils.data import TensorDataset

from quorate.machine.devices import Group
from quorate.machine.host import MIB, host
from quorate.training import opening


def bewares(capsys: Any, workers: int) -> list[str]:
    trainer = front_door.trainer(
        lambda: nn.Linear(1, 1),
        lambda model, batch: model(batch[0]).mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
        batch_size=8,
        shards=2,
        devices=["cpu"] * workers,
        engine="towers",
    )
    trainer.fit(TensorDataset(torch.ones(16, 1)), steps=1)
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("beware: ")]


def test_more_workers_than_cores_are_said_before_the_first_update(
    capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = replace(host(), cores_allowed=2, cores_limit=None, memory_free_bytes=MIB)
    monkeypatch.setattr(opening, "host", lambda: machine)
    assert bewares(capsys, 2) == []
    assert bewares(capsys, 3) == [
        "beware: 3 workers x 1 thread on 2 cores: workers wait for one another; lower --workers or "
        "--threads"
    ]


def test_worker_processes_need_memory_and_workers_elsewhere_need_nothing_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = replace(host(), cores_allowed=64, cores_limit=None, memory_free_bytes=100 * MIB)
    monkeypatch.setattr(opening, "host", lambda: machine)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    groups = [Group([torch.device("cpu")])] * 4
    (line,) = opening._shortages(groups, 1, "processes")
    assert line.startswith("beware: 100 MiB are left ")
    assert "a run with 4 workers takes 512 MiB" in line
    assert opening._shortages(groups, 1, "ray") == []
    assert opening._shortages(groups, 1, "towers") == []
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert opening._shortages(groups, 1, "collective") == []
    assert opening._shortages([Group([torch.device("cuda", 0)])], 1, "processes") == []
