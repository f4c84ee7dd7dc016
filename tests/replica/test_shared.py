"""``Shared``: its contents, who reads and sets values at each time, and the same bits."""

import copy
import functools
import gc
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.digests import digest_of
from support.fits import fit
from support.front_door import trainer as trainer_of
from support.messages import expect_error
from support.plain_loop import assert_close, plain_loop
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import quorate
from quorate.errors import MisfitError, SharedError

DRAW = torch.Generator().manual_seed(0)
ROWS = TensorDataset(torch.randn(24, 3, generator=DRAW), torch.randn(24, 1, generator=DRAW))
SLOWLY = functools.partial(torch.optim.SGD, lr=0.01)
SHAPE: dict[str, Any] = {"batch_size": 8, "shards": 4, "devices": "cpu", "engine": "towers"}


@pytest.fixture(autouse=True)
def _alone() -> None:
    """Have none of a test before."""
    gc.collect()


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def trainer(loss: Callable[..., Any], workers: int = 1, **settings: Any) -> quorate.Trainer:
    return trainer_of(net, loss, optimizer=SLOWLY, workers=workers, **SHAPE | settings)


# --- the object -----------------------------------------------------------------------------------


def test_values_are_attributes_and_items() -> None:
    shared = quorate.Shared("a", beta=0.5, note="x", nothing=None, mean=nn.Parameter(torch.ones(2)))
    shared.beta = np.float32(0.25)
    shared["note"] = "y"
    assert (shared.beta, shared["note"], shared.nothing) == (0.25, "y", None)
    assert type(shared.beta) is float
    assert not shared.mean.requires_grad
    assert [*shared] == ["beta", "note", "nothing", "mean"]
    assert repr(shared) == "Shared('a', beta, note, nothing, mean)"
    with pytest.raises(AttributeError, match="has beta, note, nothing, mean, and no 'gamma'"):
        _ = shared.gamma
    held = {"anneal": shared}
    assert copy.deepcopy(held)["anneal"] is copy.copy(shared) is shared


IMPOSSIBLE: list[Callable[[], object]] = [
    lambda: quorate.Shared("a b"),
    lambda: quorate.Shared("a", _b=1),
    lambda: quorate.Shared("a", b=[1]),
    lambda: quorate.Shared("a", b=torch.eye(2).to_sparse()),
    lambda: setattr(quorate.Shared("a", b=1), "c", 1),
    lambda: setattr(quorate.Shared("a", b=1), "b", torch.ones(1)),
    lambda: setattr(quorate.Shared("a", b=torch.ones(1)), "b", 1),
    lambda: setattr(quorate.Shared("a", b=nn.Linear(1, 1)), "b", nn.Linear(1, 1)),
    lambda: delattr(quorate.Shared("a", b=1), "b"),
    lambda: pickle.dumps(quorate.Shared("a", b=1)),
]


@pytest.mark.parametrize("make", IMPOSSIBLE)
def test_what_cannot_be_is_one_line(make: Callable[[], object]) -> None:
    with expect_error(SharedError) as raised:
        make()
    assert "\n" not in str(raised.value)


# --- training -------------------------------------------------------------------------------------


class Course:
    """A loss of a student with a coefficient, a bank and a teacher, and their updates."""

    def __init__(self) -> None:
        self.teacher = net().eval()
        self.shared = quorate.Shared("course", beta=0.0, bank=torch.zeros(1), teacher=self.teacher)

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        shared, (x, y) = self.shared, batch
        out = model(x)
        aside = (out - shared.teacher(x)).square().mean() + shared.bank * out.mean()
        return (out - y).square().mean() + shared.beta * aside.sum()

    def set(self, step: int, model: nn.Module) -> None:
        self.shared.beta = step / 10
        self.shared.bank = torch.full((1 + step % 2,), step / 20)  # of two sizes
        with torch.no_grad():
            for name, value in self.teacher.state_dict().items():
                value.data.copy_(model.state_dict()[name])  # counted nowhere by torch

    def train(self, workers: int, updates: int = 6, **settings: Any) -> quorate.Trainer:
        training = trainer(self.loss, workers, **settings)
        for report in training.updates(ROWS, epochs=2, shuffle=False):
            self.set(report.global_step, training.model)
            if report.global_step == updates:
                break
        return training


def test_it_trains_as_a_plain_loop_does() -> None:
    trained, course = Course().train(1, shards=1), Course()
    expected = net()

    def updated(step: int, _loss: float) -> None:
        course.set(step, expected)

    plain_loop(expected, SLOWLY, course.loss, ROWS, steps=6, batch_size=8, updated=updated)
    assert_close(trained.model, expected, 1e-5)


def test_towers_and_resumes_have_the_same_bits(tmp_path: Path) -> None:
    digests = {digest_of(Course().train(towers, strict=True)) for towers in (1, 3)}
    first = Course().train(2, 4, run_dir=tmp_path)
    first.save()
    expected = first.evaluate(ROWS)
    second = Course()
    assert trainer(second.loss, 1, run_dir=tmp_path).evaluate(ROWS) == expected
    assert second.shared.beta == 0.4
    resumed = Course().train(3, run_dir=tmp_path)
    assert resumed.global_step == 6
    assert {*digests, digest_of(resumed)} == digests
    assert len(digests) == 1


@pytest.mark.parametrize("update", ["async", "quorum:3"])
def test_a_shard_reads_one_version_while_updates_go_on(update: str) -> None:
    """Read the newest values in a user's thread, in contrast to a shard."""
    teacher = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    teacher[1].weight = teacher[0].weight  # the tie stays
    shared = quorate.Shared("a", number=0, tensor=torch.zeros(1000), teacher=teacher)
    nn.init.constant_(teacher[0].weight, 0.0)
    elsewhere: list[int] = []

    def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        before = shared.number
        if len(elsewhere) < 5:
            other = threading.Thread(target=lambda: elsewhere.append(shared.number))
            other.start()
            other.join()
        loss = (model(batch[0]) - batch[1]).square().mean()
        assert shared.number == before
        assert shared.tensor is shared.tensor
        assert (shared.tensor == before).all()
        assert shared.teacher is not teacher
        assert shared.teacher[1].weight is shared.teacher[0].weight
        assert (shared.teacher[1].weight == before).all()
        assert not shared.teacher[1].weight.requires_grad
        return loss

    training = trainer(loss, 3, update=update)
    for report in training.updates(ROWS, epochs=6):
        shared.number = report.global_step
        shared.tensor.fill_(report.global_step)
        nn.init.constant_(teacher[0].weight, report.global_step)
    assert elsewhere


# --- forbidden actions while shards are computed --------------------------------------------------


ACTS: dict[str, Callable[[quorate.Shared], object]] = {
    "sets": lambda shared: setattr(shared, "beta", 1.0),
    "writes": lambda shared: shared.mean.add_(1),
    "counts": lambda shared: shared.teacher(torch.ones(2, 4)),
}


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_loss_that_writes_is_refused_before_training(act: str, workers: int) -> None:
    shared = quorate.Shared("a", beta=0.5, mean=torch.zeros(2), teacher=nn.BatchNorm1d(4))

    def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        ACTS[act](shared)
        return model(batch[0]).mean()

    training = trainer(loss, workers)
    with expect_error(SharedError):
        training.fit(ROWS)
    assert training.global_step == 0


class Reads(Dataset[torch.Tensor]):
    def __init__(self, shared: quorate.Shared) -> None:
        self.shared = shared

    def __len__(self) -> int:
        return 8

    def __getitem__(self, row: int) -> torch.Tensor:
        return torch.full((3,), self.shared.beta * row)


@pytest.mark.parametrize("kind", ["the module itself", "the old one", "in a dataset"])
def test_reading_in_another_way_is_refused(kind: str) -> None:
    teacher = net().eval()
    old = quorate.Shared("a", beta=0.5, teacher=teacher)
    new = quorate.Shared("a", beta=0.5, teacher=teacher) if kind == "the old one" else old

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if kind == "in a dataset":
            return model(batch).mean()
        if kind == "the old one":
            return model(batch[0]).mean() * old.beta
        return (model(batch[0]) - teacher(batch[0])).square().mean()

    data: Any = Reads(old) if kind == "in a dataset" else ROWS
    with expect_error(SharedError, name="Shared 'a'"):
        trainer(loss).fit(data, steps=1)
    teacher(torch.ones(2, 3))  # calling and reading are allowed here
    assert new.beta == 0.5


# --- checkpoints ----------------------------------------------------------------------------------


def saved(path: Path, name: str = "a", steps: int = 1, **values: Any) -> None:
    shared = quorate.Shared(name, **values)
    loss = lambda model, batch: model(batch[0]).mean()  # noqa: E731
    fit(net, loss, ROWS, steps=steps, run_dir=path, workers=1, **SHAPE)
    del shared


VALUES = {"number": 1, "tensor": torch.ones(1), "module": nn.Linear(1, 1), "wider": nn.Linear(2, 1)}


@pytest.mark.parametrize("kinds", ["number tensor", "tensor number", "module wider"])
def test_a_value_of_another_kind_is_refused_at_a_resume(tmp_path: Path, kinds: str) -> None:
    before, after = (VALUES[kind] for kind in kinds.split())
    saved(tmp_path, x=before)
    with expect_error(MisfitError):
        saved(tmp_path, x=after)


def test_what_is_new_or_gone_is_said_at_a_resume(tmp_path: Path, capsys: Any) -> None:
    saved(tmp_path, x=1, y=torch.ones(1))
    gc.collect()
    capsys.readouterr()
    saved(tmp_path, "b", steps=2, z=1)
    said = "".join(capsys.readouterr())
    assert "the checkpoint has Shared 'a', the script does not; the values are dropped" in said
    assert "the checkpoint lacks Shared b.z; the script's value is used" in said
