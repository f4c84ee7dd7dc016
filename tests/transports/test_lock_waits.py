"""How long threads wait for the interpreter's lock: less while towers compute, then as before."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import quorate
from quorate.transports.lock_waits import WAIT_S, ShortWaits


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize(("workers", "waits_s"), [(1, 0.005), (2, WAIT_S)])
def test_threads_wait_less_while_several_towers_compute(workers: int, waits_s: float) -> None:
    sys.setswitchinterval(0.005)
    trainer = quorate.Trainer(
        lambda: nn.Linear(3, 1),
        lambda model, batch: model(batch[0]).square().mean(),
        optimizer=torch.optim.SGD,
        batch_size=4,
        shards=2,
        workers=quorate.Workers(workers, engine="towers"),
    )
    found = [
        sys.getswitchinterval() for _ in trainer.updates(TensorDataset(torch.randn(8, 3)), epochs=1)
    ]
    assert found == pytest.approx([waits_s, waits_s])
    assert sys.getswitchinterval() == pytest.approx(0.005)


def test_the_last_who_wants_it_ends_it() -> None:
    sys.setswitchinterval(0.003)
    one, other = ShortWaits(), ShortWaits()
    one.end()  # has not begun
    one.begin()
    one.begin()
    other.begin()
    assert sys.getswitchinterval() == pytest.approx(WAIT_S)
    one.end()
    one.end()
    assert sys.getswitchinterval() == pytest.approx(WAIT_S)
    other.end()
    assert sys.getswitchinterval() == pytest.approx(0.003)


def test_what_a_script_sets_stays() -> None:
    sys.setswitchinterval(1e-5)
    waits = ShortWaits()
    waits.begin()
    assert sys.getswitchinterval() == pytest.approx(1e-5)
    waits.end()
    assert sys.getswitchinterval() == pytest.approx(1e-5)
    waits.begin()
    sys.setswitchinterval(0.001)
    waits.end()
    assert sys.getswitchinterval() == pytest.approx(0.001)
