"""A line about a shard of an evaluation names the evaluation, whose batches are no steps."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import quorate

ROWS = TensorDataset(torch.randn(32, 3, generator=torch.Generator().manual_seed(0)))


def made(*, always: bool) -> quorate.Trainer:
    """A trainer whose loss raises in evaluations: on every tower, or on the second one alone."""

    def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        if not model.training and (always or threading.current_thread().name.endswith("-1")):
            raise ZeroDivisionError("no rows of this class")
        time.sleep(0.02)  # so that the second tower has its shards
        return model(batch[0]).square().mean()

    return quorate.Trainer(
        lambda: nn.Linear(3, 1),
        loss,
        optimizer=torch.optim.Adam,
        batch_size=8,
        shards=4,
        workers=quorate.Workers(2, engine="towers"),
        devices="cpu",
    )


def test_what_one_worker_raises_is_said_of_the_evaluation(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    trainer = made(always=False)
    trainer.fit(ROWS, epochs=1, validation=ROWS)
    validated = [line for line in capsys.readouterr().out.splitlines() if "raised" in line]
    trainer.evaluate(ROWS)
    evaluated = [line for line in caplog.text.splitlines() if "raised" in line]
    for name, (first, last) in (("validation", validated), ("evaluate()", evaluated)):
        where = f"worker 1 raised ZeroDivisionError: no rows of this class in {name}, batch 0, "
        assert where in first
        assert f" shards of {name}, which other workers computed; the last error was " in last


def test_the_traceback_names_the_evaluation() -> None:
    trainer = made(always=True)
    with pytest.raises(ZeroDivisionError) as caught:
        trainer.fit(ROWS, epochs=1, validation=ROWS)
    notes = " ".join(caught.value.__notes__)
    assert "(cpu), evaluation, batch 0, shard " in notes
    assert "step " not in notes
