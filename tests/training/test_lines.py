"""Lines of a run: the origin of V, slow workers, evaluations, scarce resources."""

import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.fits import fit, rows
from support.messages import expect_error
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import quorate
from quorate.errors import SettingError


def lines_of(capsys: pytest.CaptureFixture[str], data: Any = None, **settings: Any) -> list[str]:
    """Return a new trainer's lines for a fit, except for updates."""
    capsys.readouterr()
    defaults = {"batch_size": 8, "shards": None, "workers": 2, "steps": 2, "engine": "towers"}
    fit(data=rows(32) if data is None else data, **defaults | settings)
    lines = capsys.readouterr().out.splitlines()
    return [line for line in lines if not line.startswith(("epoch ", "slow workers"))]


def test_each_notice_is_said_once_and_the_first_line_says_where_shards_came_from(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    loader = DataLoader(rows(32), batch_size=8, shuffle=True)
    first, *others = lines_of(capsys)
    head, fix = first.split("; no shards given, so 2, as many as workers: ")
    assert head.endswith(", sync")
    assert fix == "pass shards=2 for the same bits on any number of workers"
    assert others == []
    assert lines_of(capsys) == [head]  # each fit describes its settings
    # News are reported: of a loader, of another number of workers.
    loaded = lines_of(capsys, loader)
    assert loaded[0] == head
    assert len(loaded) == 2
    assert lines_of(capsys, loader) == [head]
    assert "; no shards given, so 1, as many as workers: " in lines_of(capsys, workers=1)[0]
    # A resume goes on with the number, and says so.
    lines_of(capsys, run_dir=tmp_path)
    (line, *_) = lines_of(capsys, workers=3, steps=4, run_dir=tmp_path)
    assert line.startswith("8 rows = 2 shards x 4 on 3 cpu workers")
    assert "no shards given, so 2, as in the first loop of the run: pass shards=2" in line
    for given in ({"shards": 2}, {"update": "async"}):
        assert "no shards given" not in lines_of(capsys, **given)[0]


def test_a_strict_run_refuses_to_guess(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with expect_error(SettingError, name="shards"):
        lines_of(capsys, strict=True)
    assert "sync" in lines_of(capsys, strict=True, shards=2, run_dir=tmp_path)[0]
    # The checkpoint has the number: nobody guesses.
    assert "sync" in lines_of(capsys, strict=True, workers=3, steps=4, run_dir=tmp_path)[0]


# --- evaluations and slow workers -----------------------------------------------------------------


def test_what_a_worker_raises_is_said_of_the_evaluation(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Report batches of the evaluation, as its batches are no steps."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if not model.training and threading.current_thread().name.endswith("-1"):
            raise ZeroDivisionError("no rows of this class")
        time.sleep(0.02)  # until the second tower has its shards
        return model(batch[0]).square().mean()

    data = rows(32)
    trainer = fit(loss=loss, data=data, batch_size=8, workers=2, epochs=1, validation=data)
    validated = [line for line in capsys.readouterr().out.splitlines() if "raised" in line]
    trainer.evaluate(data)
    evaluated = [line for line in caplog.text.splitlines() if "raised" in line]
    for name, (first, last) in (("validation", validated), ("evaluate()", evaluated)):
        where = f"worker 1 raised ZeroDivisionError: no rows of this class in {name}, batch 0, "
        assert where in first
        assert f" shards of {name}, which other workers computed; the last error was " in last


@pytest.mark.slow
def test_slow_workers_are_named_once_when_a_run_ends(capsys: pytest.CaptureFixture[str]) -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        time.sleep(0.4 if threading.current_thread().name.endswith("-1") else 0.04)
        return model(batch[0]).square().mean()

    data = rows(64)
    fit(loss=loss, data=data, batch_size=16, workers=2, epochs=2, validation=data)
    (of_fit,) = (line for line in capsys.readouterr().out.splitlines() if "slow" in line)
    assert "slow workers: worker 1 (cpu) " in of_fit
    assert " of training and " in of_fit
    assert of_fit.endswith(" of validation computed by another worker too"), of_fit


# --- a shard of one row, impossible for BatchNorm -------------------------------------------------


def of_one_row(
    layers: list[nn.Module], data: TensorDataset, steps: int | None = None, **sizes: int
) -> quorate.Trainer:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    sizes = {"batch_size": 24, "shards": 4} | sizes
    return fit(lambda: nn.Sequential(*layers), loss, data, workers=1, steps=steps, **sizes)


def classified(count: int, *shape: int) -> TensorDataset:
    x = torch.randn(count, *shape, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, torch.arange(count) % 2)


@pytest.mark.parametrize("count", [97, 103])
def test_it_is_refused_before_the_first_update_with_what_helps(count: int) -> None:
    vectors: list[nn.Module] = [nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)]
    with pytest.raises(SettingError) as caught:
        of_one_row(vectors, classified(count, 4))
    text = str(caught.value)
    assert text.startswith("batch_size: got 24, ")
    assert "'1' (BatchNorm1d)" in text
    for name, value in re.findall(r"(batch_size|shards)=(\d+)", text):
        of_one_row(vectors, classified(count, 4), **{name: int(value)})
    # Shards absent from all steps are not refused, and one image has many values per channel.
    of_one_row(vectors, classified(104, 4), steps=5)
    of_one_row(vectors, classified(101, 4), steps=4)
    images = [nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(27, 2)]
    of_one_row(images, classified(101, 1, 4, 4))
