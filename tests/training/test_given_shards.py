"""Where V comes from: the first line says it, and a strict run does not guess."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import front_door
from support.messages import expect_error
from torch import nn
from torch.utils.data import TensorDataset

from quorate.errors import SettingError

ROWS = TensorDataset(torch.arange(32.0).reshape(32, 1))


def first_line(capsys: Any, workers: int = 2, steps: int = 2, **settings: Any) -> str:
    trainer = front_door.trainer(
        lambda: nn.Linear(1, 1),
        lambda model, batch: model(batch[0]).mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
        batch_size=8,
        devices=["cpu"] * workers,
        engine="towers",
        **settings,
    )
    capsys.readouterr()
    trainer.fit(ROWS, steps=steps)
    line: str = capsys.readouterr().out.splitlines()[0]
    return line


@pytest.mark.parametrize("workers", [1, 2])
def test_the_first_line_says_where_it_came_from(capsys: Any, workers: int) -> None:
    line = first_line(capsys, workers)
    fix = f"pass shards={workers} for the same bits on any number of workers"
    assert line.endswith(f", sync; no shards given, so {workers}, as many as workers: {fix}")


def test_a_resume_says_that_it_goes_on_with_it(capsys: Any, tmp_path: Path) -> None:
    first_line(capsys, 2, run_dir=tmp_path)
    line = first_line(capsys, 3, steps=4, run_dir=tmp_path)
    assert line.startswith("8 rows = 2 shards x 4 on 3 cpu workers")
    assert "no shards given, so 2, as in the first loop of the run: pass shards=2" in line


@pytest.mark.parametrize("settings", [{"shards": 2}, {"update": "async"}])
def test_nothing_is_said_where_it_was_given_or_bits_depend_on_timing(
    capsys: Any, settings: dict[str, Any]
) -> None:
    assert "no shards given" not in first_line(capsys, **settings)


def test_a_strict_run_refuses_to_guess(capsys: Any, tmp_path: Path) -> None:
    with expect_error(SettingError, name="shards"):
        first_line(capsys, strict=True)
    assert "sync" in first_line(capsys, strict=True, shards=2, run_dir=tmp_path)
    # The checkpoint has it: nobody guesses.
    assert "sync" in first_line(capsys, 3, 4, strict=True, run_dir=tmp_path)
