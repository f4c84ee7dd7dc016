"""Runs whose epochs are not each row once in the shuffled order, or whose rows are augmented."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.fits import fit
from support.messages import expect_error
from support.parabola import DATA, trainer
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import quorate
from quorate.errors import CheckpointError, DataError, SettingError

WEIGHTS = torch.arange(40.0) % 7


def last_first(rows: np.ndarray) -> np.ndarray:
    return rows[::-1]


def even_first(rows: np.ndarray) -> np.ndarray:
    return rows[np.argsort(rows % 2, kind="stable")]


WAYS: dict[str, dict[str, Any]] = {
    "none": {},
    "weights": {"sampling": WEIGHTS},
    "balanced": {"sampling": quorate.Sampling.balanced([row // 36 for row in range(40)])},
    "more": {"sampling": quorate.Sampling(WEIGHTS, rows=66)},
    "once": {"sampling": quorate.Sampling(WEIGHTS, rows=20, replacement=False)},
    "drop": {"last": "drop"},
    "join": {"last": "join"},
    "few": {"sampling": quorate.Sampling(WEIGHTS, rows=30), "last": "join"},
    "even": {"order": even_first},
    "backwards": {"order": last_first},
}
SIZES = {
    "more": [12] * 5 + [6],
    "once": [12, 8],
    "drop": [12] * 3,
    "join": [12, 12, 16],
    "few": [12, 18],
}


@pytest.mark.parametrize(
    ("way", "update"), [*((way, "sync") for way in WAYS), ("more", "async"), ("drop", "async")]
)
def test_each_epoch_has_the_updates_that_the_plan_says(way: str, update: str) -> None:
    expected = SIZES.get(way, [12, 12, 12, 4])
    run = trainer(update=update, **WAYS[way])
    reports = list(run.updates(DATA, epochs=2))
    assert sum(report.rows for report in reports) == 2 * sum(expected)
    if update == "sync":
        assert [report.rows for report in reports] == 2 * expected
    assert len(reports) == 2 * run.updates_per_epoch(DATA)
    assert [report.epoch for report in reports if report.ends_epoch] == [0, 1]
    # Where rows are dropped in training, an evaluation has them.
    loss = nn.functional.mse_loss(run.model(DATA.tensors[0] / 40), DATA.tensors[1]).item()
    assert run.evaluate(DATA)["loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize(
    ("way", "others"),
    [("weights", ["none", "balanced", "more", "once"]), ("none", ["weights", "drop", "even"])],
)
def test_another_epoch_is_another_run(tmp_path: Path, way: str, others: list[str]) -> None:
    trainer(tmp_path, **WAYS[way]).fit(DATA, steps=2)
    for other in others:
        with expect_error(CheckpointError):
            trainer(tmp_path, **WAYS[other]).fit(DATA, steps=3)
    trainer(tmp_path, **WAYS[way]).fit(DATA, steps=3)


@pytest.mark.parametrize(
    ("name", "got", "options"),
    [
        ("sampling", "39 weights", {"sampling": [1.0] * 39}),
        ("last", "keep", {"last": "keep"}),
        ("shards", 3, {"sampling": quorate.Sampling(WEIGHTS, rows=2)}),
        ("shuffle", False, {"sampling": WEIGHTS, "shuffle": False}),
        ("order", "list", {"order": [1, 2]}),
        ("order", "row 0, 2 times", {"order": lambda rows: np.where(rows == 7, 0, rows)}),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    name: str, got: object, options: dict[str, Any]
) -> None:
    with expect_error(SettingError, name=name, got=got):
        trainer(**{k: v for k, v in options.items() if k != "shuffle"}).fit(
            DATA, shuffle=options.get("shuffle")
        )


class Drawing:
    """Rows with the numbers drawn for the row."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, row: int) -> tuple[Any, ...]:
        return row, torch.rand(()), random.random(), np.random.rand()


def test_a_row_that_comes_again_in_an_epoch_draws_other_numbers() -> None:
    """A repeated row draws new numbers, in ``augment`` too; the first time as without sampling."""

    def augment(batch: Any, draws: quorate.Draws) -> Any:
        return [*batch, draws.uniform()[:, 0]]

    def drawn(**settings: Any) -> list[tuple[float, ...]]:
        found: list[tuple[float, ...]] = []

        def loss(model: nn.Module, batch: Any) -> torch.Tensor:
            found.extend(zip(*(x.tolist() for x in batch), strict=True))
            return model(batch[1][:, None]).mean()

        fit(lambda: nn.Linear(1, 1), loss, Drawing(), epochs=1, shards=2, workers=1, seed=1,
            spot_check_every=0, augment=augment, **settings)  # fmt: skip
        return found

    sampled = drawn(batch_size=15, sampling=quorate.Sampling([1, 1, 5], rows=30))
    plain = drawn(batch_size=2)
    # A trial computes a shard first, and the same shard comes again.
    assert len({numbers for _, *numbers in sampled for numbers in numbers}) == 120
    first: dict[float, list[float]] = {}
    for row, *numbers in sampled:
        first.setdefault(row, numbers)
    assert first == {row: numbers for row, *numbers in plain}


# --- augmentation: the same for a row in each epoch, whoever computes -----------------------------

ROWS = 48


class ByRow(Dataset[tuple[torch.Tensor, int]]):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([float(row)]), row


NUMBERS = TensorDataset(torch.arange(float(ROWS))[:, None], torch.arange(ROWS))


def noisy(batch: list[torch.Tensor], draws: quorate.Draws) -> list[torch.Tensor]:
    x, rows = batch
    assert rows.tolist() == draws.rows.tolist()
    return [x + draws.uniform(), rows]


def seen(data: Any = NUMBERS, **settings: Any) -> set[tuple[int, float]]:
    """Return row and value of all rows trained on in two epochs, with evaluations between."""
    values: set[tuple[int, float]] = set()

    def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        x, rows = batch
        if model.training:
            pairs = zip(rows.tolist(), x[:, 0].tolist(), strict=True)
            values.update((row, round(value, 4)) for row, value in pairs)
        else:
            assert torch.equal(x[:, 0], rows.float())
        return model(x / ROWS).mean()

    settings = {"augment": noisy, "batch_size": 16, "workers": 2} | settings
    fit(lambda: nn.Linear(1, 1), loss, data, validation=data, **{"epochs": 2} | settings)
    return values


@pytest.mark.parametrize(
    ("data", "settings"),
    [
        (NUMBERS, {"workers": 1}),
        (NUMBERS, {"batch_size": 20, "shards": 3, "workers": 3}),
        (ByRow(), {}),
        (ByRow(), {"batch_size": 7, "shards": 2, "loader_workers": 2}),
        (NUMBERS, {"update": "bounded:2"}),
    ],
)
def test_a_row_has_one_augmentation_per_epoch_whoever_computes(
    data: Any, settings: dict[str, Any]
) -> None:
    expected = {
        (row, round(row + float(quorate.Draws(0, epoch, [row]).uniform()), 4))
        for row in range(ROWS)
        for epoch in (0, 1)
    }
    assert len(expected) == 2 * ROWS
    assert seen(data, **settings) == expected


def test_a_resume_says_that_the_augmentation_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for augment in (noisy, noisy, None):
        seen(augment=augment, run_dir=tmp_path, epochs=1 if augment else 2)
    said = capsys.readouterr().out
    assert said.count("same bits: no") == 1
    assert "because is_augmented was True and is False since step 3" in said


def test_what_is_no_augmentation_is_refused_and_what_one_raises_has_its_rows() -> None:
    def broken(batch: list[torch.Tensor], draws: quorate.Draws) -> list[torch.Tensor]:
        if 17 in draws.rows:
            raise RuntimeError("no such colour")
        return batch

    with pytest.raises(DataError, match="what augment returned: got None"):
        seen(augment=lambda *_: None)
    with expect_error(SettingError, name="augment", got="int"):
        seen(augment=3)
    with pytest.raises(RuntimeError, match="no such colour") as caught:
        seen(augment=broken)
    assert "rows [" in "".join(caught.value.__notes__)
