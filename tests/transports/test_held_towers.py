"""Towers that user code holds when the loop is over: interrupted, named, left behind."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from support.small import DATA

import quorate
from quorate.transports import towers


def fit_holding(hold: object, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], float]:
    """Train on two towers, of which one is held in a shard that the other computes too."""
    said: list[str] = []
    held = threading.Event()
    monkeypatch.setattr(towers, "GRACE_S", 0.3)

    def loss(model: torch.nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        is_tower = threading.current_thread().name.startswith("quorate-tower")
        if is_tower and len(batch[0]) and len(seen) > 20 and not held.is_set():
            held.set()
            hold()  # type: ignore[operator]
        seen.append(None)
        return (model(batch[0]) - batch[1]).square().mean()

    seen: list[None] = []
    run = quorate.Trainer(
        lambda: torch.nn.Linear(6, 1),
        loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        batch_size=12,
        shards=2,
        devices="cpu",
        workers=quorate.Workers(2, engine="towers"),
    )
    run._say = said.append  # of a loop of one's own
    begun = time.monotonic()
    for _ in run.updates(DATA, epochs=8):
        pass
    assert held.is_set()
    return said, time.monotonic() - begun


def test_a_loop_in_python_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    def hold() -> None:
        while True:
            time.sleep(0.01)

    said, took_s = fit_holding(hold, monkeypatch)
    assert not any("left behind" in line for line in said)
    assert took_s < 30


def test_one_that_waits_for_a_lock_is_named_and_left_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = threading.Event()

    def hold() -> None:
        gate.wait(60)

    said, took_s = fit_holding(hold, monkeypatch)
    (line,) = (line for line in said if "left behind" in line)
    gate.set()  # and it ends by itself
    assert "test_held_towers.py, line " in line
    assert line.split(";")[0].endswith("in hold")
    assert took_s < 30
