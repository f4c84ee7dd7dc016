"""Who may read and set a ``Shared`` when: a shard reads it as it was, and sets nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from support.messages import expect_error
from support.shared_values import CPU, ROWS, net, trainer
from torch import nn
from torch.utils.data import Dataset

import quorate
from quorate.errors import SharedError
from quorate.replica.beside.values import Newest, Values
from quorate.replica.beside.view import View


def test_a_view_is_of_its_values_whatever_is_set_meanwhile() -> None:
    teacher = nn.Linear(1, 1, bias=False)
    nn.init.ones_(teacher.weight)
    shared = quorate.Shared("a", beta=1.0, mean=torch.ones(1), teacher=teacher)
    newest, view = Newest(), View(CPU)
    view.take(newest.look())
    shared.beta, shared.mean = 2.0, torch.full((1,), 2.0)
    nn.init.constant_(teacher.weight, 2.0)
    found = []

    def read() -> None:
        x = torch.ones(1, 1)
        found.append((shared.beta, shared.mean.item(), shared.teacher(x).item()))

    with view.reading():
        read()
        assert not shared.teacher.weight.requires_grad
        assert shared.teacher is not teacher
        other = threading.Thread(target=read)  # one of the user's own reads what is set
        other.start()
        other.join()
    read()
    view.take(newest.look())
    with view.reading():
        read()
    assert found == [(1.0, 1.0, 1.0), (2.0, 2.0, 2.0), (2.0, 2.0, 2.0), (2.0, 2.0, 2.0)]


def test_tensors_are_on_the_device_of_the_replica() -> None:
    shared = quorate.Shared("a", beta=1.0, mean=torch.ones(3))
    newest, view = Newest(), View(torch.device("meta"))  # any that is not the CPU
    view.take(newest.look())
    with view.reading():
        assert shared.mean.device.type == "meta"
        assert shared.mean is shared.mean  # it was brought there once
    assert shared.mean.device == CPU


def test_tied_parameters_stay_tied() -> None:
    teacher = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    teacher[1].weight = teacher[0].weight
    shared, view, newest = quorate.Shared("a", teacher=teacher), View(CPU), Newest()
    for factor in (1.0, 2.0):
        nn.init.constant_(teacher[0].weight, factor)
        view.take(newest.look())
        with view.reading():
            assert shared.teacher[1].weight is shared.teacher[0].weight
            assert shared.teacher[1].weight[0, 0].item() == factor


def test_a_shared_that_the_coordinator_has_not_is_refused() -> None:
    view = View(CPU)
    view.take(Values(1))
    shared = quorate.Shared("late", beta=0.5)
    with expect_error(SharedError, name="Shared 'late'"), view.reading():
        _ = shared.beta


def test_one_that_was_made_again_is_refused_where_shards_read_the_old_one() -> None:
    old = quorate.Shared("a", beta=0.5)
    new = quorate.Shared("a", beta=0.5)
    with expect_error(SharedError, name="Shared 'a'"), View(CPU).reading():
        _ = old.beta
    with View(CPU).reading():
        assert new.beta == 0.5


def sets(shared: quorate.Shared) -> None:
    shared.beta = 1.0


def writes(shared: quorate.Shared) -> None:
    shared.mean.add_(1)


def counts(shared: quorate.Shared) -> None:
    shared.teacher(torch.ones(2, 4))


@pytest.mark.parametrize(
    "act",
    [
        sets,
        writes,
        counts,
    ],
)
@pytest.mark.parametrize("towers", [1, 2])
def test_a_loss_that_writes_is_refused_before_training(
    act: Callable[[quorate.Shared], None], towers: int
) -> None:
    shared = quorate.Shared("a", beta=0.5, mean=torch.zeros(2), teacher=nn.BatchNorm1d(4))

    def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        act(shared)
        return model(batch[0]).mean()

    training = trainer(loss, towers)
    with expect_error(SharedError):
        training.fit(ROWS)
    assert training.global_step == 0


def test_a_loss_that_calls_the_module_itself_is_refused() -> None:
    teacher = net().eval()
    shared = quorate.Shared("a", teacher=teacher)

    def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        return (model(batch[0]) - teacher(batch[0])).square().mean()

    with expect_error(SharedError, name="Shared 'a'"):
        trainer(loss).fit(ROWS)
    teacher(torch.ones(2, 3))  # here it may be called
    del shared


def test_a_dataset_that_reads_one_is_refused() -> None:
    shared = quorate.Shared("a", beta=0.5)

    class Reads(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, row: int) -> torch.Tensor:
            return torch.full((3,), shared.beta * row)

    with expect_error(SharedError, name="Shared 'a'"):
        trainer(lambda model, batch: model(batch).mean()).fit(Reads())
    assert shared.beta == 0.5  # here it may be read
