"""State and writes of user code: tests with more than a case of ``strangers``.

There each misbehaviour is a case, named on towers and in all other ways.
"""

import random
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from support.fits import Calls, fit, rows, squares
from torch import nn

import quorate


def test_what_the_script_keeps_is_as_the_first_shard_left_it() -> None:
    """Searching for states computes from other parameters: an anchor must not be of those."""
    held: dict[str, torch.Tensor] = {}

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        (weight, *_) = model.parameters()
        held.setdefault("start", weight.detach().clone())
        return squares(model, batch) + (weight - held["start"]).square().sum()

    model, doubts = nn.Linear(6, 1), list[str]()
    notes = Calls(lambda _, report: doubts.extend(report.doubts))
    start = model.weight.detach().clone()
    fit(model, loss, steps=2, workers=1, engine="towers", callbacks=[notes])
    assert "'held' in the closure of the loss function is" in doubts[0]
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


def test_a_callback_may_write_while_a_tower_computes_what_nobody_waits_for() -> None:
    model = nn.ModuleDict({"a": nn.Linear(6, 1), "frozen": nn.Linear(6, 1).requires_grad_(False)})

    def loss(model: Any, batch: Any) -> torch.Tensor:
        if threading.current_thread().name.endswith("-2"):
            time.sleep(0.01)  # another tower computes a shard too
        return (model.a(batch[0]) + model.frozen(batch[0]) - batch[1]).square().mean()

    doubts: list[str] = []

    def fade(_: Any, report: quorate.Report) -> None:
        doubts.extend(report.doubts)
        for parameter in model["frozen"].parameters():
            parameter.data = parameter.data * 0.9
        time.sleep(0.03)  # meanwhile the late tower ends its shard

    sizes = {"batch_size": 8, "epochs": 5, "workers": 3, "engine": "towers"}
    fit(model, loss, rows(16), callbacks=[Calls(fade)], **sizes)
    assert not doubts
