"""Towers that user code holds when the loop is over: interrupted, named, left behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

import quorate
from quorate.transports import towers

BATCH, STEPS, HELD = 8, 40, 20


def once(file: Path) -> bool:
    """Whether this is the first call; no variable, for which towers compute one at a time."""
    try:
        file.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def said_of(hold: Callable[[], object], folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Train on two towers, one of which is held in a shard that the other computes too."""
    said: list[str] = []
    monkeypatch.setattr(towers, "GRACE_S", 0.3)

    def loss(model: torch.nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        if int(batch[0].min()) // BATCH == HELD and once(folder / "held"):
            hold()
        return model(batch[0]).square().mean()

    trainer = quorate.Trainer(
        lambda: torch.nn.Linear(1, 1),
        loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=1e-6),
        batch_size=BATCH,
        shards=2,
        devices="cpu",
        workers=quorate.Workers(2, engine="towers"),
    )
    trainer._say = said.append  # of a loop of one's own
    rows = torch.arange(float(BATCH * STEPS))[:, None]
    for report in trainer.updates(TensorDataset(rows), shuffle=False):
        last_step = report.global_step
    assert last_step == STEPS
    assert (folder / "held").exists()
    assert not any("one at a time" in line for line in said)
    return said


def test_a_loop_in_python_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hold() -> None:
        while True:
            time.sleep(0.01)

    said = said_of(hold, tmp_path, monkeypatch)
    assert not any("did not stop" in line for line in said)


def test_one_that_waits_for_a_lock_is_named_and_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    said = said_of(lambda: gate.wait(60), tmp_path, monkeypatch)
    gate.set()  # it ends by itself
    (line,) = (line for line in said if "did not stop" in line)
    assert "test_held_towers.py, line " in line
    assert line.split(";")[0].endswith("in <lambda>")
