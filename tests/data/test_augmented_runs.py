"""Augmentation in a training: a row has one in each epoch, whoever computes."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import front_door
from support.messages import expect_error
from support.warm import WARM
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import quorate
from quorate.coordination.plan import Plan
from quorate.data import images as ops
from quorate.data.draws import Draws
from quorate.data.source import Source
from quorate.errors import DataError, SettingError
from quorate.replica.digest import digest

SCRIPT = Path(__file__).parents[1] / "scripts" / "augmented.py"


ROWS = 48


class ByRow(Dataset[tuple[torch.Tensor, int]]):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([float(row)]), row


NUMBERS = TensorDataset(torch.arange(float(ROWS))[:, None], torch.arange(ROWS))


def noisy(batch: list[torch.Tensor], draws: Draws) -> list[torch.Tensor]:
    x, rows = batch
    assert rows.tolist() == draws.rows.tolist()
    return [x + draws.uniform(), rows]


def seen(dataset: Any = NUMBERS, augment: Any = noisy, **options: Any) -> set[tuple[int, float]]:
    """Row and value of all that was trained on in two epochs."""
    values: set[tuple[int, float]] = set()

    def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        x, rows = batch
        if model.training:
            values.update(zip(rows.tolist(), x[:, 0].tolist(), strict=True))
        else:
            assert torch.equal(x[:, 0], rows.float())
        return model(x).mean()

    trainer = front_door.trainer(
        nn.Linear(1, 1),
        loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=1e-6),
        devices="cpu",
        loading=quorate.Loading(augment=augment),
        **{"batch_size": 16, "shards": 4, "workers": 2} | options,
    )
    trainer.evaluate(dataset)
    for report in trainer.updates(dataset, epochs=2):
        if report.ends_epoch:
            trainer.evaluate(dataset)  # on the same workers
    return values


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (NUMBERS, {"workers": 1}),
        (NUMBERS, {"batch_size": 20, "shards": 3, "workers": 3}),
        (ByRow(), {}),
        (NUMBERS, {"loader_workers": 1}),
        (ByRow(), {"batch_size": 7, "shards": 2, "loader_workers": 2}),
        (NUMBERS, {"update": "bounded:2"}),
    ],
)
def test_a_row_has_one_augmentation_per_epoch_whoever_computes(
    dataset: Any, options: dict[str, Any]
) -> None:
    expected = {
        (row, row + float(Draws(0, epoch, [row]).uniform()))
        for row in range(ROWS)
        for epoch in (0, 1)
    }
    assert len(expected) == 2 * ROWS
    assert {(row, round(x, 4)) for row, x in seen(dataset, **options)} == {
        (row, round(x, 4)) for row, x in expected
    }


def test_generators_that_are_not_the_draws_are_the_shards() -> None:
    """Not of the row: but who computes does not matter."""

    def careless(batch: list[torch.Tensor], _draws: Draws) -> list[torch.Tensor]:
        x, rows = batch
        noise = torch.rand(len(x), 1) + np.random.rand() + random.random()
        return [x + noise, rows]

    found = [seen(augment=careless, workers=w, loader_workers=w // 3) for w in (1, 2, 3)]
    assert len(found[0]) == 2 * ROWS
    assert found[0] == found[1] == found[2]


def test_the_digest_is_one_on_any_number_of_towers_and_after_a_resume(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (ROWS, 3, 12, 12), dtype=torch.uint8, generator=generator)
    labels = torch.arange(ROWS) % 10

    def distort(batch: list[torch.Tensor], draws: Draws) -> list[torch.Tensor]:
        x, labels = batch
        x = ops.flip(ops.crop(x, draws.uniform(2), (8, 8)), draws.coins())
        return [ops.standardize(ops.contrast(x, draws.uniform(low=0.5, high=2))), labels]

    def train(workers: int, dataset: Any, steps: int, run_dir: Path | None = None) -> str:
        trainer = quorate.Trainer(
            lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)),
            lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
            optimizer=torch.optim.Adam,
            batch_size=16,
            shards=4,
            devices="cpu",
            workers=workers,
            loading=quorate.Loading(augment=distort),
            run_dir=run_dir,
        )
        for _ in trainer.updates(dataset, steps=steps):
            pass
        if run_dir is not None:
            trainer.save()
        return digest(trainer.model.state_dict().items())

    whole = TensorDataset(images, labels)
    rows = [whole[i] for i in range(ROWS)]  # loaded one by one, and collated
    train(2, whole, 4, tmp_path)  # the rest, from the second epoch on, by another trainer
    found = {
        train(1, whole, 6),
        train(3, whole, 6),
        train(2, rows, 6),
        train(1, whole, 6, tmp_path),
    }
    assert len(found) == 1


def test_a_resume_without_augmentation_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(steps: int, **options: Any) -> str:
        trainer = front_door.trainer(
            nn.Linear(1, 1), lambda model, batch: model(batch[0]).mean(), optimizer=torch.optim.SGD,
            batch_size=16, shards=2, devices="cpu", workers=1, run_dir=tmp_path, **options,
        )  # fmt: skip
        trainer.fit(NUMBERS, steps=steps)
        return capsys.readouterr().out

    train(1, augment=noisy)
    assert "same bits: no" not in train(2, augment=noisy)
    assert "same bits: no, because is_augmented was True and is False since step 2" in train(3)


def test_what_is_no_augmentation_is_refused() -> None:
    source = Source(NUMBERS, Plan(rows=ROWS, batch_size=8, shards=2), None, lambda *_: None)
    with expect_error(DataError, name="what augment returned"):
        source.load((0, 0))
    with expect_error(SettingError, name="augment", got="int"):
        seen(augment=3)


def test_what_it_raises_reaches_the_caller_with_the_rows() -> None:
    def broken(batch: list[torch.Tensor], draws: Draws) -> list[torch.Tensor]:
        if 17 in draws.rows:
            raise RuntimeError("no such colour")
        return batch

    with pytest.raises(RuntimeError, match="no such colour") as caught:
        seen(augment=broken)
    assert "rows [" in "".join(caught.value.__notes__)


@pytest.mark.slow
def test_worker_processes_augment_alike_and_are_compared(tmp_path: Path) -> None:
    def run(name: str, *options: str, arguments: tuple[str, ...] = ()) -> tuple[int, str]:
        where = ("--run-dir", str(tmp_path / name))
        words = ["run", "--devices", "cpu", *where, *options, str(SCRIPT), *arguments]
        code, out, err = WARM.run(words, os.environ, 120)
        return code, out + err

    digests = set()
    for name, options, arguments in (
        ("tower", ("--engine", "towers", "--workers", "1"), ()),
        ("two", ("--engine", "processes", "--workers", "2"), ("--loader-workers", "1")),
    ):
        code, said = run(name, *options, arguments=arguments)
        assert code == 0, said
        code, shown, _ = WARM.run(["inspect", "--json", str(tmp_path / name)], os.environ, 60)
        digests.add(json.loads(shown)["digest"])
    assert len(digests) == 1
    # A worker that augments in another way is found before the first update.
    code, said = run("other", "--engine", "processes", "--workers", "2", arguments=("--other",))
    assert code == 2, said
    assert "a worker that ran the script again has another dataset" in said
