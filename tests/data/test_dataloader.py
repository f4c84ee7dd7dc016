"""Loaders of torch's where a dataset is expected: what is in them is taken, said, or refused."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.messages import expect_error
from support.parabola import DATA, trainer
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

import quorate
from quorate.data.dataloader import taken
from quorate.data.loading import Loading
from quorate.errors import CheckpointError, SettingError
from quorate.replica.digest import digest

WEIGHTS = [float(row % 7) for row in range(40)]
LOADING = Loading()


def doubled(samples: list[Any]) -> Any:
    x, y = default_collate(samples)
    return x, 2 * y


def trained(data: Any, workers: int = 1, shuffle: bool | None = None, **options: Any) -> str:
    run = trainer(workers=workers, **options)
    run.fit(data, epochs=2, shuffle=shuffle)
    return digest(run.model.state_dict().items())


class Halves(Sampler[int]):
    """The even rows of even epochs, the odd ones of the others, in an order of each epoch's."""

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


class Backwards(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(39, -1, -1))


class Careless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(40).tolist())


SAMPLING = quorate.Sampling(WEIGHTS, rows=30)
SAME = {
    "shuffled": (DataLoader(DATA, 12, shuffle=True), {}, None),
    "in order": (DataLoader(DATA, 12), {}, False),
    "dropped": (DataLoader(DATA, 12, shuffle=True, drop_last=True), {"last": "drop"}, None),
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
    "subset": (
        DataLoader(DATA, 12, sampler=SubsetRandomSampler(range(5, 35))),
        {"sampling": quorate.Sampling([5 <= r < 35 for r in range(40)], replacement=False)},
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
    run = trainer()
    run.fit(loader, steps=2, validation=DataLoader(DATA, 7))
    lines = [line for line in capsys.readouterr().out.splitlines() if "DataLoader" in line]
    assert lines == [
        "dataset is a DataLoader; used: its dataset, collate_fn=doubled, "
        "num_workers=1 as processes=1, "
        "drop_last as last='drop', its order as shuffle=True; not used: pin_memory, generator, "
        "batch_size=10 (Trainer's 12 counts)",
        "validation is a DataLoader; used: its dataset",
    ]


def test_what_the_trainer_was_given_counts() -> None:
    loader = DataLoader(
        DATA,
        12,
        sampler=WeightedRandomSampler(WEIGHTS, 30),
        collate_fn=doubled,
        num_workers=1,
        drop_last=True,
    )
    loading = Loading(collate=default_collate, processes=2, last="join", sampling=WEIGHTS)
    found = taken(loader, loading, batch_size=12)
    assert found.loading is loading
    assert found.line == (
        "dataset is a DataLoader; used: its dataset; not used: "
        "collate_fn=doubled (collate= counts), "
        "num_workers=1 (processes=2 counts), drop_last (last='join' counts), WeightedRandomSampler "
        "(sampling= counts)"
    )
    asked = taken(DataLoader(DATA, 12, shuffle=True), LOADING, shuffle=False, batch_size=12)
    assert not asked.shuffle
    assert str(asked.line).endswith("not used: RandomSampler (shuffle=False counts)")
    assert trained(DataLoader(DATA, 12, True), shuffle=False) == trained(DATA, shuffle=False)


def test_a_sampler_of_ones_own_is_asked_for_each_epoch(tmp_path: Path) -> None:
    seen: list[float] = []

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        seen.extend(batch[0].flatten().tolist())
        return model(batch[0]).square().mean()

    run = quorate.Trainer(
        lambda: torch.nn.Linear(1, 1),
        loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.0),
        batch_size=5,
        shards=1,
        devices="cpu",
        compute=quorate.Compute(spot_check_every=0),
    )
    loader = DataLoader(DATA, 5, sampler=Halves())
    for n, _ in enumerate(run.updates(loader, epochs=3)):
        if n == 0:
            del seen[:-5]  # the shard that was tried
    expected = []
    for epoch in range(3):
        sampler = Halves()
        sampler.set_epoch(epoch)
        expected += [float(row) for row in sampler]
    assert seen == expected
    assert trained(loader, workers=2) == trained(loader)
    # In the middle of an epoch, and on.
    trainer(tmp_path).fit(loader, steps=3)
    resumed = trainer(tmp_path, workers=2)
    resumed.fit(loader, epochs=2)
    assert digest(resumed.model.state_dict().items()) == trained(loader)
    with expect_error(CheckpointError):
        trainer(tmp_path).fit(DataLoader(DATA, 5, sampler=Backwards()), epochs=3)
    # One that is always the same needs no set_epoch.
    backwards = taken(DataLoader(DATA, 5, sampler=Backwards()), LOADING, batch_size=5).loading
    assert backwards.sampling is not None
    assert backwards.sampling.drawn(0, 3).tolist() == list(range(39, -1, -1))


def test_an_evaluation_has_every_row_in_batches_of_the_loaders_function() -> None:
    run = trainer()
    run.fit(DATA, steps=3)
    plain = run.evaluate(DATA)
    for loader in (DataLoader(DATA, 7, shuffle=True, drop_last=True), DataLoader(DATA, 7)):
        assert run.evaluate(loader) == plain
    other = run.evaluate(DataLoader(DATA, 7, collate_fn=doubled))
    assert other == trained_and_evaluated_with_doubled()
    assert other != plain


def trained_and_evaluated_with_doubled() -> dict[str, float]:
    run = trainer()
    run.fit(DATA, steps=3)
    x, y = DATA.tensors
    return run.evaluate(TensorDataset(x, 2 * y))


def test_validation_has_the_function_of_its_own_loader() -> None:
    """A plain dataset beside a loader has that of training: they are rows of one kind."""
    found = {}
    for name, validation in (
        ("its own", DataLoader(DATA, 5)),
        ("doubled", DataLoader(DATA, 5, collate_fn=doubled)),
        ("plain", DATA),
    ):
        values: list[float] = []

        class Note(quorate.Callback):
            def evaluated(self, _step: int, metrics: Any) -> None:
                values.append(metrics["loss"])  # noqa: B023

        run = trainer()
        run.fit(
            DataLoader(DATA, 12, True, collate_fn=doubled),
            validation=quorate.Validation(validation),
            callbacks=[Note()],
        )
        found[name] = values
    assert found["doubled"] == found["plain"] != found["its own"]


class Words(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Odd(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter([])


class Outside(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([1, 40])


class Uneven(Sampler[int]):
    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

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
        DataLoader(DATA, 5, sampler=Outside()),
        DataLoader(DATA, 5, sampler=["a"]),
        DataLoader(DATA, 5, sampler=[]),
        DataLoader(DATA, 5, sampler=SubsetRandomSampler([1, 1])),
    ],
    ids=[
        "stream",
        "iter",
        "no batches",
        "batch sampler",
        "careless",
        "outside",
        "texts",
        "empty",
        "twice",
    ],
)
def test_what_cannot_be_asked_by_position_is_refused_in_a_line(loader: Any) -> None:
    with expect_error(SettingError) as raised:
        trainer().fit(loader)
    assert raised.value.name.startswith("dataset")
    assert "\n" not in str(raised.value)


def test_a_sampler_that_has_other_rows_in_each_epoch_is_refused_when_it_has() -> None:
    with expect_error(SettingError, name="dataset.sampler: DataLoader", got="19 rows in epoch 1"):
        trainer().fit(DataLoader(DATA, 5, sampler=Uneven()), epochs=2)


@pytest.mark.parametrize("sampler", [WeightedRandomSampler(WEIGHTS, 30), Halves()])
def test_an_evaluation_of_some_rows_is_refused(sampler: Any) -> None:
    run = trainer()
    with expect_error(SettingError, name="dataset: DataLoader"):
        run.evaluate(DataLoader(DATA, 5, sampler=sampler))
    run.evaluate(DataLoader(Subset(DATA, range(3)), 5, sampler=SequentialSampler(range(3))))


def test_updates_per_epoch_is_asked_of_a_loader_too() -> None:
    loader = DataLoader(DATA, 12, sampler=WeightedRandomSampler(WEIGHTS, 30), drop_last=True)
    assert trainer().updates_per_epoch(loader) == 2
    assert trainer().updates_per_epoch(DataLoader(DATA, 12)) == 4
    assert np.isfinite(trainer().evaluate(DataLoader(DATA))["loss"])
