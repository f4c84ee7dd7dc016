"""What user code keeps and writes: what takes more than a case of ``strangers``.

There each misbehaviour is a case, which is named on towers and in all other ways.
"""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from support.fits import fit, rows, squares
from torch import nn

import quorate


class Doubts(quorate.Callback):
    def __init__(self) -> None:
        self.found: list[str] = []

    def started(self, trainer: quorate.Trainer) -> None:
        self.model: Any = trainer.model

    def updated(self, report: quorate.Report) -> None:
        self.found += report.doubts


def test_what_the_script_keeps_is_as_the_first_shard_left_it() -> None:
    """Looking for states computes from other parameters: an anchor must not be one of those."""
    held: dict[str, torch.Tensor] = {}

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        (weight, *_) = model.parameters()
        held.setdefault("start", weight.detach().clone())
        return squares(model, batch) + (weight - held["start"]).square().sum()

    model, doubts = nn.Linear(6, 1), Doubts()
    start = model.weight.detach().clone()
    fit(model, loss, steps=2, workers=1, engine="towers", callbacks=[doubts])
    assert "'held' in the closure of the loss function is" in doubts.found[0]
    assert torch.equal(held["start"], start)


@pytest.mark.parametrize("workers", [1, 3])
def test_each_shard_draws_numbers_of_its_own(workers: int) -> None:
    def drawn(seed: int) -> dict[Any, tuple[float, ...]]:
        found = {}

        def loss(model: nn.Module, batch: Any, at: Any) -> torch.Tensor:
            numbers = random.random(), float(np.random.rand()), float(torch.rand(()))
            found[at.step, int(at.rows[0])] = numbers
            return squares(model, batch)

        fit(loss=loss, steps=4, workers=workers, engine="towers", seed=seed, shuffle=False)
        return found

    first, again, other = drawn(1), drawn(1), drawn(2)
    assert first == again
    numbers = [number for found in (first, other) for each in found.values() for number in each]
    assert len({*numbers}) == len(numbers) == 2 * 16 * 3


class Fades(Doubts):
    def updated(self, report: quorate.Report) -> None:
        super().updated(report)
        for parameter in self.model.frozen.parameters():
            parameter.data = parameter.data * 0.9
        time.sleep(0.03)  # meanwhile the tower that is late ends its shard


def test_a_callback_may_write_while_a_tower_computes_what_nobody_waits_for() -> None:
    model = nn.ModuleDict({"a": nn.Linear(6, 1), "frozen": nn.Linear(6, 1).requires_grad_(False)})

    def loss(model: Any, batch: Any) -> torch.Tensor:
        if threading.current_thread().name.endswith("-2"):
            time.sleep(0.01)  # another tower computes its shard too
        return (model.a(batch[0]) + model.frozen(batch[0]) - batch[1]).square().mean()

    fades = Fades()
    fit(
        model, loss, rows(16), batch_size=8, epochs=5, workers=3, engine="towers", callbacks=[fades]
    )
    assert not fades.found
