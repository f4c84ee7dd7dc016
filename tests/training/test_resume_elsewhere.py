"""What is not as it was when a run was saved is said at its resume, and kept with the run."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support import front_door
from support.messages import expect_error
from support.runs import inspected
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from quorate.data.row_sample import ROWS, row_sample
from quorate.errors import SameBitsError
from quorate.training.resume import differences

NUMBERS = torch.arange(48, dtype=torch.float32).reshape(48, 1)
StepLR = torch.optim.lr_scheduler.StepLR


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch[0]).square().mean()


def train(run_dir: Path, steps: int, data: Any = None, **settings: Any) -> None:
    torch.manual_seed(0)
    defaults: dict[str, Any] = {"optimizer": partial(torch.optim.SGD, lr=1e-5)}
    trainer = front_door.trainer(
        nn.Linear(1, 1), loss, batch_size=12, shards=2, devices="cpu", workers=1,
        run_dir=run_dir, **defaults | settings,
    )  # fmt: skip
    trainer.fit(TensorDataset(NUMBERS) if data is None else data, steps=steps)


def test_a_run_that_goes_on_as_it_was_has_no_doubt(tmp_path: Path) -> None:
    train(tmp_path, 3)
    train(tmp_path, 5)
    assert inspected(tmp_path)["same_bits"] is True
    assert inspected(tmp_path)["doubts"] == []


def test_other_rows_of_the_same_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = NUMBERS.clone()
    other[-1] += 1
    train(tmp_path, 3)
    train(tmp_path, 5, TensorDataset(other))
    said = (
        f"the dataset has different values in 1 of {ROWS} compared rows, first in row 47, "
        "since step 3"
    )
    assert f"same bits: no, because {said}" in capsys.readouterr().out
    assert inspected(tmp_path)["same_bits"] is False
    assert inspected(tmp_path)["doubts"] == [said]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line.get("doubts") for line in lines] == [None, None, None, [said], None]
    # It stays with the run, and is not said anew.
    train(tmp_path, 6, TensorDataset(other))
    assert "same bits: no" not in capsys.readouterr().out
    assert inspected(tmp_path)["doubts"] == [said]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"optimizer": partial(torch.optim.SGD, lr=1e-6)},
            "lr of parameter group 0 was 1e-05 and is 1e-06 in the script since step 3",
        ),
        (
            {"optimizer": partial(torch.optim.SGD, lr=1e-5, weight_decay=0.1)},
            "weight_decay of parameter group 0 was 0 and is 0.1 in the script since step 3",
        ),
        (
            {"schedule": partial(StepLR, step_size=5)},
            "step_size of the schedule was 4 and is 5 in the script since step 3",
        ),
        ({"clip_norm": 1.0}, "clip_norm was None and is 1.0 since step 3"),
    ],
)
def test_other_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: dict[str, Any], said: str
) -> None:
    usual = {"schedule": partial(StepLR, step_size=4)}
    train(tmp_path, 3, **usual)
    train(tmp_path, 5, **usual | settings)
    assert f"same bits: no, because {said}" in capsys.readouterr().out
    assert said in inspected(tmp_path)["doubts"]


def test_a_strict_run_does_not_go_on_with_what_is_other(tmp_path: Path) -> None:
    train(tmp_path, 3, strict=True)
    with expect_error(SameBitsError, name="strict"):
        train(tmp_path, 5, strict=True, clip_norm=1.0)
    assert inspected(tmp_path)["global_step"] == 3


def test_another_processor() -> None:
    now = dict.fromkeys(("torch", "device_types", "schedule", "precision", "compile"), 1)
    now |= {"threads": 1, "clip_norm": None, "ema_decay": None, "is_augmented": False}
    facts = {**now, "row_sample": None, "hyperparameters": [{}], "processors": ["Maker AVX2"]}
    (said,) = differences({**facts, "processors": ["Maker AVX512"]}, facts)
    assert said == "processors was ['Maker AVX512'] and is ['Maker AVX2']"
    assert differences({"global_step": 3}, facts) == []  # a checkpoint of before says nothing


class Moody(Dataset[torch.Tensor]):
    """Its third row is another one each time, the last cannot be loaded."""

    def __init__(self) -> None:
        self.loads = 0

    def __len__(self) -> int:
        return 4

    def __getitem__(self, row: int) -> torch.Tensor:
        self.loads += 1
        if row == 3:
            raise LookupError("no such row")
        return torch.tensor(float(self.loads if row == 2 else row))


def test_rows_that_are_not_repeatable_are_not_compared() -> None:
    class Some(Moody):
        def __len__(self) -> int:
            return 3

    sample = row_sample(Some(), 3, seed=0)
    assert [*sample] == ["0", "1", "2"]
    assert sample["2"] is None
    assert len({sample["0"], sample["1"], None}) == 3
    assert row_sample(Moody(), 4, seed=0) == dict.fromkeys("0123")


def test_rows_that_draw_are_those_of_their_own_stream() -> None:
    class Noisy(Moody):
        def __getitem__(self, row: int) -> torch.Tensor:
            return torch.rand(3)

    assert row_sample(Noisy(), 4, seed=1) == row_sample(Noisy(), 4, seed=1)
    assert row_sample(Noisy(), 4, seed=1) != row_sample(Noisy(), 4, seed=2)
    assert None not in row_sample(Noisy(), 4, seed=1).values()
