"""Where a shard is in its run: who is told, and that it is a pure function of plan and step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support import front_door
from support.messages import expect_error
from torch import nn
from torch.utils.data import Dataset, Subset, TensorDataset

import quorate
from quorate.coordination.course import Course
from quorate.coordination.plan import Plan, PlanByShard, from_json
from quorate.data import at as place_of_rows
from quorate.data.source import Source
from quorate.errors import SameBitsError, UserError
from quorate.replica.beside.asks import asks_for_at
from quorate.replica.beside.at import at_of
from quorate.replica.digest import digest


def two(model: Any, batch: Any) -> None: ...
def three(model: Any, batch: Any, at: Any) -> None: ...
def other_name(model: Any, batch: Any, where: Any) -> None: ...
def with_default(model: Any, batch: Any, smoothing: float = 0.1) -> None: ...
def at_with_default(model: Any, batch: Any, at: Any = None) -> None: ...
def anything(*args: Any) -> None: ...
def leading(weight: float, model: Any, batch: Any, at: Any) -> None: ...


@functools.wraps(three)
def decorated(*args: Any) -> None: ...


class OfAnObject:
    def __call__(self, model: Any, batch: Any, at: Any) -> None: ...

    def method(self, model: Any, batch: Any, at: Any) -> None: ...

    def method_of_two(self, model: Any, batch: Any) -> None: ...

    @staticmethod
    def static(model: Any, batch: Any, at: Any) -> None: ...


class Loss(nn.Module):
    def forward(self, model: Any, batch: Any, at: Any) -> None: ...


@pytest.mark.parametrize(
    ("function", "asks"),
    [
        (two, False),
        (three, True),
        (other_name, True),
        (with_default, False),
        (at_with_default, True),
        (anything, False),
        (functools.partial(leading, 0.5), True),
        (functools.partial(three, at=None), False),
        (functools.partial(two), False),
        (decorated, True),
        (OfAnObject(), True),
        (OfAnObject().method, True),
        (OfAnObject().method_of_two, False),
        (OfAnObject.static, True),
        (Loss(), True),
        (torch.add, False),
    ],
)
def test_a_loss_function_asks_by_its_signature(function: Callable[..., Any], asks: bool) -> None:
    assert asks_for_at(function) is asks


def test_one_of_four_parameters_is_refused() -> None:
    with expect_error(quorate.UserError, name="loss", got="<lambda>(model, batch, at, more)"):
        weight(loss=lambda model, batch, at, more: 0, devices=["cpu"])


@pytest.mark.parametrize("kind", [Plan, PlanByShard])
def test_it_is_a_pure_function_of_the_plan(kind: type[Plan]) -> None:
    plan = kind(rows=20, batch_size=8, shards=2)
    per_epoch = plan.steps_per_epoch
    plan.course = Course(last_step=4 * per_epoch)
    same = from_json(plan.to_json())
    for step in range(4 * per_epoch):
        for shard in range(plan.shards_of(step)):
            rows = plan.shard(step, shard)
            first, second = at_of(plan, step, rows), at_of(same, step, same.shard(step, shard))
            assert (first.step, first.epoch) == (step, step // per_epoch)
            assert first.progress == second.progress == step / (4 * per_epoch)
            assert first.training
            np.testing.assert_array_equal(first.rows, second.rows)


def test_nothing_of_it_can_be_set() -> None:
    at = at_of(Plan(rows=8, batch_size=8, shards=1), 0, np.arange(8))
    with pytest.raises(dataclasses.FrozenInstanceError):
        at.step = 3  # type: ignore[misc]
    with pytest.raises(ValueError, match="read-only"):
        at.rows[0] = 1


# One weight, whose gradient is the mean of x, times what the annealing gives.
ROWS = TensorDataset(torch.arange(12.0).reshape(12, 1))


def annealed(model: nn.Module, batch: list[torch.Tensor], at: Any) -> torch.Tensor:
    assert len(at.rows) == len(batch[0])
    assert batch[0][:, 0].tolist() == at.rows.tolist()
    return model(batch[0]).mean() * (1 + at.progress) * (1 + at.epoch) / (1 + at.step)


def weight(**settings: Any) -> quorate.Trainer:
    def one() -> nn.Module:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        return model

    return front_door.trainer(
        one,
        settings.pop("loss", annealed),
        optimizer=lambda params: torch.optim.SGD(params, lr=1.0),
        batch_size=4,
        shards=2,
        **settings,
    )


@pytest.mark.parametrize("towers", [1, 2])
def test_annealing_is_what_a_loop_by_hand_gives(towers: int) -> None:
    trainer = weight(devices=["cpu"] * towers)
    trainer.fit(ROWS, epochs=2, shuffle=False)
    by_hand = 0.0
    for step in range(6):
        first = step % 3 * 4
        mean = sum(range(first, first + 4)) / 4
        by_hand -= mean * (1 + step / 6) * (1 + step // 3) / (1 + step)
    assert trainer.model.weight.item() == pytest.approx(by_hand, rel=1e-6)


def test_an_evaluation_is_told_the_update_that_would_come_next() -> None:
    told = set()

    def loss(model: nn.Module, batch: list[torch.Tensor], at: Any) -> torch.Tensor:
        if not at.training:
            told.add((at.step, at.epoch, at.progress, model.training))
        return model(batch[0]).mean()

    trainer = weight(loss=loss, devices=["cpu"])
    trainer.evaluate(ROWS)
    for report in trainer.updates(ROWS, epochs=2):
        if report.global_step == 4:
            trainer.evaluate(ROWS)
    trainer.evaluate(ROWS)
    assert told == {(0, 0, 0.0, False), (4, 1, 4 / 6, False), (6, 2, 1.0, False)}


def test_a_checkpoint_that_is_evaluated_is_told_where_it_was_written(tmp_path: Any) -> None:
    told = set()

    def loss(model: nn.Module, batch: list[torch.Tensor], at: Any) -> torch.Tensor:
        told.add((at.step, at.epoch, at.progress))
        return model(batch[0]).mean()

    weight(devices=["cpu"], run_dir=tmp_path).fit(ROWS, epochs=4, steps=4)
    trainer = weight(loss=loss, devices=["cpu"], run_dir=tmp_path)
    told.clear()
    trainer.evaluate(ROWS)
    assert (4, 1, 1.0) in told


def test_a_longer_run_says_that_progress_is_another(tmp_path: Any, capsys: Any) -> None:
    for epochs in (2, 3):
        weight(devices=["cpu"], run_dir=tmp_path).fit(ROWS, epochs=epochs)
    said = capsys.readouterr()
    line = "at.progress counted to 6 updates and counts to 9 since step 6"
    assert line in said.out + said.err
    strict = weight(devices=["cpu"], run_dir=tmp_path, compute=quorate.Compute(strict=True))
    with pytest.raises(SameBitsError, match="progress"):
        strict.fit(ROWS, epochs=4)


def test_a_longer_run_that_asks_for_the_epoch_alone_says_nothing(
    tmp_path: Any, capsys: Any
) -> None:
    def loss(model: nn.Module, batch: list[torch.Tensor], at: Any) -> torch.Tensor:
        return model(batch[0]).mean() / (1 + at.epoch)

    digests = []
    for path, lengths in ((tmp_path / "two", (2, 3)), (tmp_path / "one", (3,))):
        for epochs in lengths:
            trainer = weight(loss=loss, devices=["cpu"], run_dir=path)
            trainer.fit(ROWS, epochs=epochs)
        digests.append(digest(trainer.model.state_dict().items()))
    said = capsys.readouterr()
    assert "progress" not in said.out + said.err
    assert digests[0] == digests[1]


# --- datasets -------------------------------------------------------------------------------------


class Told(Dataset[torch.Tensor]):
    """Each row says where it is loaded."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, row: int) -> torch.Tensor:
        at = place_of_rows()
        assert row in at.rows
        return torch.tensor([row, at.epoch, at.step, at.training, at.progress])


def test_rows_are_told_where_they_are_in_whichever_order_they_are_loaded() -> None:
    plan = Plan(rows=8, batch_size=4, shards=2)
    plan.course = Course(last_step=8)
    source = Source(Subset(Told(), range(8)), plan)
    for ticket in [(1, 0), (2, 1), (1, 1), (6, 0), (0, 0), (2, 0)]:  # as a feed ahead may
        step, shard = ticket
        rows = plan.shard(step, shard)
        expected = [[row, step // 2, step, 1, step / 8] for row in rows]
        assert source.load(ticket).data.tolist() == expected


def test_collate_and_augment_are_told_too() -> None:
    told = []

    def collate(samples: list[Any]) -> torch.Tensor:
        told.append(("collate", place_of_rows().step))
        return torch.stack(samples)

    def augment(batch: torch.Tensor, draws: quorate.Draws) -> torch.Tensor:
        told.append(("augment", place_of_rows().step))
        np.testing.assert_array_equal(place_of_rows().rows, draws.rows)
        return batch

    Source(Told(), Plan(rows=8, batch_size=4, shards=1), collate, augment).load((3, 0))
    assert told == [("collate", 3), ("augment", 3)]


def test_outside_of_a_load_there_is_no_place() -> None:
    with expect_error(UserError, name="quorate.data.at()"):
        place_of_rows()
    Source(Told(), Plan(rows=8, batch_size=4, shards=1)).load((0, 0))
    with expect_error(UserError, name="quorate.data.at()"):
        place_of_rows()


@pytest.mark.parametrize("loaders", [0, 1])
def test_a_curriculum_by_epoch_is_right_where_rows_are_loaded_ahead(loaders: int) -> None:
    seen: dict[int, set[float]] = {}

    def loss(model: nn.Module, batch: torch.Tensor, at: Any) -> torch.Tensor:
        if at.training and len(at.rows):
            seen.setdefault(at.epoch, set()).update(batch[:, 1].tolist())
        return model(batch[:, :1]).mean()

    trainer = weight(loss=loss, devices=["cpu"], loading=quorate.Loading(processes=loaders))
    trainer.fit(Told(), epochs=4)
    assert seen == {epoch: {float(epoch)} for epoch in range(4)}


def test_a_dataset_with_set_epoch_is_told_that_nobody_calls_it(capsys: Any) -> None:
    class Old(Told):
        def set_epoch(self, epoch: int) -> None:
            raise AssertionError(epoch)

    trainer = weight(loss=lambda model, batch: model(batch[:, :1]).mean(), devices=["cpu"])
    trainer.fit(Subset(Old(), range(8)), epochs=1)
    said = capsys.readouterr()
    assert "nothing calls Old.set_epoch()" in said.out + said.err
