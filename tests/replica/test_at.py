"""The position of a shard in a run: who receives it, and a pure function of plan and step."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.fits import fit
from support.messages import expect_error
from torch import nn
from torch.utils.data import Dataset, Subset, TensorDataset

import quorate
from quorate.data import at as place_of_rows
from quorate.errors import SameBitsError, UserError

ROWS = TensorDataset(torch.arange(12.0).reshape(12, 1))
seen: list[Any] = []  # of a test


def zero() -> nn.Module:
    """Return a single weight, with the mean of x as its gradient."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


def trained(loss: Any, data: Any = ROWS, **settings: Any) -> quorate.Trainer:
    shape = {"batch_size": 4, "shards": 2, "engine": "towers", "workers": 1}
    sgd = functools.partial(torch.optim.SGD, lr=1.0)
    return fit(zero, loss, data, **{"epochs": 1, "optimizer": sgd, **shape, **settings})


# --- loss functions with a position ---------------------------------------------------------------


def two(model: Any, batch: Any) -> torch.Tensor:
    return model(batch[0]).mean()


def three(model: Any, batch: Any, at: Any) -> torch.Tensor:
    seen.append(at)
    return model(batch[0]).mean()


def other_name(model: Any, batch: Any, where: Any) -> torch.Tensor:
    return three(model, batch, where)


def with_default(model: Any, batch: Any, smoothing: float = 0.1) -> torch.Tensor:
    return two(model, batch) * smoothing


def anything(*args: Any) -> torch.Tensor:
    return two(*args)


def leading(weight: float, model: Any, batch: Any, at: Any) -> torch.Tensor:
    return weight * three(model, batch, at)


class OfAnObject:
    def __call__(self, model: Any, batch: Any, at: Any) -> torch.Tensor:
        return three(model, batch, at)

    def method_of_two(self, model: Any, batch: Any) -> torch.Tensor:
        return two(model, batch)


TOLD = (three, other_name, functools.partial(leading, 0.5), OfAnObject(), OfAnObject().__call__)
NOT_TOLD = (two, with_default, anything, functools.partial(two), OfAnObject().method_of_two)


@pytest.mark.parametrize("loss", [*TOLD, *NOT_TOLD, functools.partial(three, at=None)])
def test_a_loss_function_asks_by_its_signature(loss: Callable[..., Any]) -> None:
    seen.clear()
    trained(loss, steps=1)
    assert any(at is not None for at in seen) is (loss in TOLD)


def test_one_of_four_parameters_is_refused() -> None:
    with expect_error(UserError, name="loss", got="<lambda>(model, batch, at, more)"):
        trained(lambda model, batch, at, more: 0)


# --- contents of a position -----------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2])
def test_annealing_is_what_a_loop_by_hand_gives(workers: int) -> None:
    def annealed(model: nn.Module, batch: Any, at: Any) -> torch.Tensor:
        assert batch[0][:, 0].tolist() == at.rows.tolist()
        assert at.training is model.training
        with pytest.raises(dataclasses.FrozenInstanceError):
            at.step = 3
        with pytest.raises(ValueError, match="read-only"):
            at.rows[0] = 1
        return model(batch[0]).mean() * (1 + at.progress) * (1 + at.epoch) / (1 + at.step)

    trainer = trained(annealed, epochs=2, shuffle=False, workers=workers)
    by_hand = 0.0
    for step in range(6):
        first = step % 3 * 4
        mean = sum(range(first, first + 4)) / 4
        by_hand -= mean * (1 + step / 6) * (1 + step // 3) / (1 + step)
    assert trainer.model.weight.item() == pytest.approx(by_hand, rel=1e-6)


def test_an_evaluation_is_told_the_update_that_would_come_next(tmp_path: Path) -> None:
    told = set()

    def loss(model: nn.Module, batch: Any, at: Any) -> torch.Tensor:
        if not at.training:
            told.add((at.step, at.epoch, at.progress, model.training))
        return model(batch[0]).mean()

    trainer = trained(loss, epochs=4, steps=4, run_dir=tmp_path)
    trainer.evaluate(ROWS)
    assert told == {(4, 1, 1.0, False)}
    told.clear()
    for report in trainer.updates(ROWS, epochs=2):
        if report.global_step == 5:
            trainer.evaluate(ROWS)
    trainer.evaluate(ROWS)
    assert told == {(5, 1, 5 / 6, False), (6, 2, 1.0, False)}


def test_a_longer_run_says_that_progress_is_another(tmp_path: Path, capsys: Any) -> None:
    def by_progress(model: nn.Module, batch: Any, at: Any) -> torch.Tensor:
        return model(batch[0]).mean() * (1 + at.progress)

    def by_epoch(model: nn.Module, batch: Any, at: Any) -> torch.Tensor:
        return model(batch[0]).mean() / (1 + at.epoch)

    for loss, is_said in ((by_progress, True), (by_epoch, False)):
        for epochs in (2, 3):
            trained(loss, epochs=epochs, run_dir=tmp_path / loss.__name__)
        said = "".join(capsys.readouterr())
        assert ("at.progress counted to 6 updates and counts to 9 since step 6" in said) == is_said
    with pytest.raises(SameBitsError, match="progress"):
        trained(by_progress, epochs=4, run_dir=tmp_path / "by_progress", strict=True)


# --- datasets -------------------------------------------------------------------------------------


class Told(Dataset[torch.Tensor]):
    """Rows with the position of their loading."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, row: int) -> torch.Tensor:
        at = place_of_rows()
        assert row in at.rows
        return torch.tensor([row, at.epoch, at.step, at.training, at.progress])


@pytest.mark.parametrize("loaders", [0, 1])
def test_rows_are_told_where_they_are_also_if_they_are_loaded_ahead(loaders: int) -> None:
    shards = set()

    def collate(samples: list[Any]) -> torch.Tensor:
        assert place_of_rows().step == samples[0][2]
        return torch.stack(samples)

    def augment(batch: torch.Tensor, draws: quorate.Draws) -> torch.Tensor:
        np.testing.assert_array_equal(place_of_rows().rows, draws.rows)
        return batch

    def loss(model: nn.Module, batch: torch.Tensor, at: Any) -> torch.Tensor:
        if at.training and len(at.rows):
            here = [[row, at.epoch, at.step, 1, at.progress] for row in at.rows]
            assert batch.tolist() == torch.tensor(here, dtype=torch.float64).float().tolist()
            shards.add((at.step, at.epoch))
        return model(batch[:, :1]).mean()

    loading = quorate.Loading(processes=loaders, collate=collate, augment=augment)
    trained(loss, Subset(Told(), range(8)), epochs=4, loading=loading)
    assert shards == {(step, step // 2) for step in range(8)}


def test_a_dataset_with_set_epoch_is_told_that_nobody_calls_it(capsys: Any) -> None:
    class Old(Told):
        def set_epoch(self, epoch: int) -> None:
            raise AssertionError(epoch)

    trained(lambda model, batch: model(batch[:, :1]).mean(), Subset(Old(), range(8)))
    assert "nothing calls Old.set_epoch()" in "".join(capsys.readouterr())
