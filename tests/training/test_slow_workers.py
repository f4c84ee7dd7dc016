"""Slow workers are named once, when a run ends, and not at all under ``--quiet``."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import quorate
from quorate.settings import overriding

MANY = TensorDataset(torch.randn(160, 3, generator=torch.Generator().manual_seed(0)))
ROWS = TensorDataset(MANY.tensors[0][:64])


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Take long on the second tower."""
    time.sleep(0.5 if threading.current_thread().name.endswith("-1") else 0.05)
    return model(batch[0]).square().mean()


def made() -> quorate.Trainer:
    return quorate.Trainer(
        lambda: nn.Linear(3, 1),
        loss,
        optimizer=torch.optim.Adam,
        batch_size=16,
        shards=4,
        workers=quorate.Workers(2, engine="towers"),
        devices="cpu",
    )


def about_slow_workers(text: str) -> list[str]:
    return [line for line in text.splitlines() if "slow" in line]


@pytest.mark.slow
@pytest.mark.parametrize("quiet", [False, True])
def test_a_fit_names_them_in_one_line_at_its_end(
    quiet: bool, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with overriding({"quiet": quiet}):
        trainer = made()
        trainer.fit(ROWS, epochs=2, validation=ROWS)
        lines = about_slow_workers(capsys.readouterr().out)
        trainer.evaluate(MANY)
        said = about_slow_workers(caplog.text)
    if quiet:
        assert lines == said == []
        return
    (line,) = lines
    assert line.startswith("slow workers: worker 1 (cpu) "), line
    assert " of training and " in line
    assert line.endswith(" of validation computed by another worker too"), line
    (line,) = said
    assert line.endswith(" of evaluate() computed by another worker too"), line


@pytest.mark.slow
def test_a_loop_of_your_own_names_them_at_its_end(caplog: pytest.LogCaptureFixture) -> None:
    trainer = made()
    for update in trainer.updates(ROWS, epochs=2):
        assert not about_slow_workers(caplog.text), update
        if update.global_step == 4:
            trainer.evaluate(ROWS)  # in a loop, of whose workers it is
    (line,) = about_slow_workers(caplog.text)
    assert " of training and " in line
    assert line.endswith(" of evaluate() computed by another worker too"), line
