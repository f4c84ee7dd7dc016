"""The end of a loop over towers: it waits for nobody who is late."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import quorate


class Sleeper:
    """A loss on towers that takes as long as a function of the tower's number says."""

    def __init__(self, seconds: Any) -> None:
        self._seconds = seconds

    def __call__(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        name = threading.current_thread().name
        if name.startswith("quorate-tower-"):
            time.sleep(self._seconds(int(name.rpartition("-")[2])))
        return model(batch[0]).square().mean()


def towers_end(update: str, seconds: Any, steps: int) -> float:
    """Seconds from the last update to the end of the loop."""
    trainer = quorate.Trainer(
        nn.Linear(3, 1),
        Sleeper(seconds),
        optimizer=lambda params: torch.optim.SGD(params, lr=1e-3),
        batch_size=4,
        shards=4,
        update=update,
        devices="cpu",
        workers=quorate.Workers(3, engine="towers"),
    )
    at, n = 0.0, 0
    for report in trainer.updates(TensorDataset(torch.ones(40, 3)), steps=steps):
        at, n = time.monotonic(), report.global_step
    assert n == trainer.global_step == steps
    return time.monotonic() - at


@pytest.mark.parametrize("update", ["sync", "quorum:2", "async", "bounded:3"])
def test_a_loop_over_towers_of_random_speed_ends_after_its_last_update(update: str) -> None:
    chance = random.Random(5)
    for steps in (1, 2, 3, 5, 8, 13, 21):
        slow = chance.randrange(3)
        took_s = towers_end(
            update, lambda w, s=slow: chance.uniform(0.0, 0.03 if w == s else 0.004), steps
        )
        assert took_s < 0.5


@pytest.mark.slow
def test_a_loop_over_towers_ends_though_one_sleeps_on() -> None:
    for update in ("sync", "quorum:2", "async"):
        assert towers_end(update, lambda w: 3.0 if w == 2 else 0.01, 12) < 2.8
    assert towers_end("bounded:3", lambda w: 1.0 if w == 2 else 0.01, 8) < 2.0
