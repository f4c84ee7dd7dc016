"""torch's loaders in the place of a dataset: each part is used, reported, or refused."""

import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.digests import digest
from support.fits import fit
from support.messages import expect_error
from support.parabola import DATA, trainer
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

import quorate
from quorate.errors import CheckpointError, SettingError

WEIGHTS = [float(row % 7) for row in range(40)]


def doubled(samples: list[Any]) -> Any:
    x, y = default_collate(samples)
    return x, 2 * y


def trained(data: Any, workers: int = 1, shuffle: bool | None = None, **options: Any) -> str:
    run = trainer(workers=workers, **options)
    run.fit(data, epochs=2, shuffle=shuffle)
    return digest(run.model.state_dict().items())


class Halves(Sampler[int]):
    """The even rows of even epochs, the odd rows of odd epochs, in a different order each epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        rows = list(range(self.epoch % 2, 40, 2))
        random.Random(self.epoch).shuffle(rows)
        return iter(rows)

    def __len__(self) -> int:
        return 20


class Careless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(40).tolist())


SAMPLING = quorate.Sampling(WEIGHTS, rows=30)
SAME = {
    "shuffled": (DataLoader(DATA, 12, shuffle=True), {}, None),
    "in order": (DataLoader(DATA, 12), {}, False),
    "collated": (DataLoader(DATA, 12, True, collate_fn=doubled), {"collate": doubled}, None),
    "weighted": (
        DataLoader(DATA, 12, sampler=WeightedRandomSampler(WEIGHTS, 30)),
        {"sampling": SAMPLING},
        None,
    ),
    "batch sampler": (
        DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 12, drop_last=True)),
        {"last": "drop"},
        None,
    ),
    "distributed": (
        DataLoader(DATA, 6, sampler=DistributedSampler(DATA, num_replicas=2, rank=1)),
        {},
        None,
    ),
    "bootstrap": (
        DataLoader(DATA, 12, sampler=RandomSampler(DATA, replacement=True, num_samples=50)),
        {"sampling": quorate.Sampling([1] * 40, rows=50)},
        None,
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_a_loader_is_what_is_in_it(name: str) -> None:
    loader, options, shuffle = SAME[name]
    expected = trained(DATA, shuffle=shuffle, **options)
    assert trained(loader) == trained(loader, workers=2) == expected


def said_of(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if "DataLoader" in line]


def test_one_line_says_what_was_taken(capsys: pytest.CaptureFixture[str]) -> None:
    loader = DataLoader(
        DATA,
        batch_size=10,
        shuffle=True,
        num_workers=1,
        collate_fn=doubled,
        drop_last=True,
        pin_memory=True,
        generator=torch.Generator(),
    )
    trainer().fit(loader, steps=2, validation=DataLoader(DATA, 7))
    assert said_of(capsys) == [
        "dataset is a DataLoader; used: its dataset, collate_fn=doubled, "
        "num_workers=1 as processes=1, "
        "drop_last as last='drop', its order as shuffle=True; not used: pin_memory, generator, "
        "batch_size=10 (Trainer's 12 counts)",
        "validation is a DataLoader; used: its dataset",
    ]


def test_a_sampler_of_ones_own_is_asked_for_each_epoch(tmp_path: Path) -> None:
    def epochs_of(sampler: Iterable[int], epochs: int) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in range(epochs)]

        class Note(quorate.Callback):
            def updated(self, report: quorate.Report) -> None:
                found[report.epoch] += report.totals["seen"].nonzero()[:, 0].tolist()

        def loss(model: torch.nn.Module, batch: Any) -> dict[str, torch.Tensor]:
            seen = torch.bincount(batch[0][:, 0].long(), minlength=40)
            return {"loss": model(batch[0] / 40).square().mean(), "seen": seen}

        fit(lambda: torch.nn.Linear(1, 1), loss, DataLoader(DATA, 1, sampler=sampler),
            batch_size=1, shards=1, epochs=epochs, callbacks=[Note()],
            totals={"seen": lambda total: float(total.sum())})  # fmt: skip
        return found

    halves, expected = Halves(), []
    for epoch in range(3):
        halves.set_epoch(epoch)
        expected.append([*halves])
    assert epochs_of(Halves(), 3) == expected
    # A constant sampler needs no set_epoch.
    assert epochs_of(range(39, -1, -1), 2) == [[*range(39, -1, -1)]] * 2
    loader = DataLoader(DATA, 5, sampler=Halves())
    # In the middle of an epoch, and on.
    trainer(tmp_path).fit(loader, steps=3)
    assert trained(loader, workers=2, run_dir=tmp_path) == trained(loader)
    with expect_error(CheckpointError):
        trainer(tmp_path).fit(DataLoader(DATA, 5, sampler=range(40)), epochs=3)


def test_an_evaluation_has_every_row_in_batches_of_the_loaders_function() -> None:
    run = trainer()
    run.fit(DATA, steps=3)
    assert run.evaluate(DataLoader(DATA, 7, shuffle=True, drop_last=True)) == run.evaluate(DATA)
    x, y = DATA.tensors
    other = run.evaluate(DataLoader(DATA, 7, collate_fn=doubled))
    assert other == run.evaluate(TensorDataset(x, 2 * y))
    for sampler in (WeightedRandomSampler(WEIGHTS, 30), Halves()):
        with expect_error(SettingError, name="dataset: DataLoader"):
            run.evaluate(DataLoader(DATA, 5, sampler=sampler))


class Words(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Odd(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter([])


class Uneven(Halves):
    def __iter__(self) -> Iterator[int]:
        return iter(range(20 - self.epoch))


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Words()),
        Odd(DATA),
        DataLoader(DATA, batch_size=None),
        DataLoader(DATA, batch_sampler=[[0, 1], [2, 3]]),
        DataLoader(DATA, 5, sampler=Careless()),
        DataLoader(DATA, 5, sampler=[1, 40]),
        DataLoader(DATA, 5, sampler=["a"]),
        DataLoader(DATA, 5, sampler=[]),
        DataLoader(DATA, 5, sampler=SubsetRandomSampler([1, 1])),
        DataLoader(DATA, 5, sampler=Uneven()),  # 19 rows in epoch 1
    ],
)
def test_what_cannot_be_asked_by_position_is_refused_in_a_line(loader: Any) -> None:
    with expect_error(SettingError) as raised:
        trainer().fit(loader, epochs=2)
    assert raised.value.name.startswith("dataset")
    assert "\n" not in str(raised.value)
