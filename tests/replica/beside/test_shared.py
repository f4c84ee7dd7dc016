"""``Shared``: what can be in it, who may read and set it, and that shards have it as it was."""

from __future__ import annotations

import copy
import os
import pickle
import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import pytest
import torch
from support import front_door
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import quorate
from quorate.coordination.plan import Plan
from quorate.errors import MisfitError, SharedError
from quorate.replica.beside import shared as shared_values
from quorate.replica.beside.values import NO_VALUES, Newest, Values
from quorate.replica.beside.view import View
from quorate.replica.digest import digest

CPU = torch.device("cpu")
ROWS = TensorDataset(
    torch.randn(24, 3, generator=torch.Generator().manual_seed(0)),
    torch.randn(24, 1, generator=torch.Generator().manual_seed(1)),
)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have none of a test before, which a traceback may hold."""
    monkeypatch.setattr(shared_values, "_known", WeakValueDictionary())


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def trainer(loss: Callable[..., Any], towers: int = 1, **settings: Any) -> quorate.Trainer:
    return front_door.trainer(
        net,
        loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
        batch_size=8,
        shards=4,
        devices=["cpu"] * towers,
        engine="towers",
        **settings,
    )


def digest_of(trained: quorate.Trainer) -> str:
    return digest(trained.model.state_dict().items())


# --- an object ------------------------------------------------------------------------------------


def test_values_are_attributes_and_items() -> None:
    shared = quorate.Shared("a", beta=0.5, note="x", nothing=None, mean=torch.zeros(2))
    shared.beta = np.float32(0.25)
    shared["note"] = "y"
    assert (shared.beta, shared["note"], shared.nothing) == (0.25, "y", None)
    assert type(shared.beta) is float
    assert [*shared] == ["beta", "note", "nothing", "mean"]
    assert len(shared) == 4
    assert "beta" in shared
    assert repr(shared) == "Shared('a', beta, note, nothing, mean)"


def test_a_tensor_that_wants_a_gradient_is_held_without() -> None:
    assert not quorate.Shared("a", mean=nn.Parameter(torch.ones(2))).mean.requires_grad


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: quorate.Shared("a b"), "got the name 'a b'"),
        (lambda: quorate.Shared("_a"), "got the name '_a'"),
        (lambda: quorate.Shared("a", _b=1), "got the name '_b'"),
        (lambda: quorate.Shared("a", b=[1]), "b: got list"),
        (lambda: quorate.Shared("a", b=torch.eye(2).to_sparse()), "b: got Tensor"),
        (lambda: setattr(quorate.Shared("a", b=1), "c", 1), "got 'c', expected b"),
        (lambda: setattr(quorate.Shared("a", b=1), "b", torch.ones(1)), "got Tensor, expected a n"),
        (lambda: setattr(quorate.Shared("a", b=torch.ones(1)), "b", 1), "got int, expected a tens"),
        (lambda: setattr(quorate.Shared("a", b=nn.Linear(1, 1)), "b", nn.Linear(1, 1)), "another"),
        (lambda: delattr(quorate.Shared("a", b=1), "b"), "cannot be deleted"),
        (lambda: pickle.dumps(quorate.Shared("a", b=1)), "cannot be pickled"),
    ],
)
def test_what_cannot_be_is_one_line(make: Callable[[], object], message: str) -> None:
    with pytest.raises(SharedError, match=message) as raised:
        make()
    assert "\n" not in str(raised.value)


def test_what_is_not_there_is_missing_as_python_says() -> None:
    shared = quorate.Shared("a", beta=0.5)
    with pytest.raises(AttributeError, match="has beta, and no 'gamma'"):
        _ = shared.gamma
    with pytest.raises(KeyError, match="gamma"):
        _ = shared["gamma"]
    assert not hasattr(shared, "gamma")


def test_a_copy_of_what_holds_it_reads_the_same() -> None:
    shared = quorate.Shared("a", beta=0.5)
    held = {"anneal": shared}
    assert copy.deepcopy(held)["anneal"] is copy.copy(shared) is shared


# --- values at one time ---------------------------------------------------------------------------


def test_a_change_makes_new_values_and_the_old_ones_stay() -> None:
    shared = quorate.Shared("a", beta=0.5, mean=torch.ones(3))
    newest = Newest()
    first = newest.look()
    assert newest.look() is first
    shared.beta = 0.25
    second = newest.look()
    assert second.tensors is first.tensors  # no copy for a number
    shared.mean.data.mul_(2)  # counted nowhere
    third = newest.look()
    assert [v.plain["a"]["beta"] for v in (first, second, third)] == [0.5, 0.25, 0.25]
    assert [v.tensors.views["a.mean"][0].item() for v in (first, third)] == [1.0, 2.0]
    assert [v.number for v in (first, second, third)] == [1, 2, 3]


@pytest.mark.parametrize("value", [float("nan"), -0.0, True, 1 << 70, "ü", None])
def test_a_value_is_the_same_until_it_is_another(value: Any) -> None:
    shared = quorate.Shared("a", beta=0.0)
    newest = Newest()
    first = newest.look()
    shared.beta = value
    second = newest.look()
    assert second is not first
    assert newest.look() is second


def test_values_travel_as_json_and_bytes() -> None:
    tensors = {
        "half": torch.randn(3, 2).to(torch.bfloat16),
        "flags": torch.tensor([True, False]),
        "image": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "number": torch.tensor(3.5),
        "none": torch.empty(0, 3),
        "waves": torch.randn(2, dtype=torch.complex64),
    }
    shared = quorate.Shared("a", beta=0.5, **tensors)
    values = Newest().look()
    sent = values.to_json(stored=True)
    assert values.tensors.segment is not None
    there = NO_VALUES.mapped(sent, os.dup(values.tensors.segment.fd))
    again = NO_VALUES.from_json(sent)
    for mine, theirs in zip(again.tensors.vectors, values.tensors.vectors, strict=True):
        mine.copy_(theirs)
    for each in (there, again):
        assert each.plain == {"a": {"beta": 0.5}}
        for key, tensor in tensors.items():
            got = each.tensors.views[f"a.{key}"]
            assert got.dtype == tensor.dtype
            assert torch.equal(got, tensor)
            assert got.stride() == tensor.stride()
    del shared


# --- shards ---------------------------------------------------------------------------------------


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
    with pytest.raises(SharedError, match="'late' is not the coordinator's"), view.reading():
        _ = shared.beta


def test_one_that_was_made_again_is_refused_where_shards_read_the_old_one() -> None:
    old = quorate.Shared("a", beta=0.5)
    new = quorate.Shared("a", beta=0.5)
    with pytest.raises(SharedError, match="made again"), View(CPU).reading():
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
    ("act", "message"),
    [
        (sets, "beta is set while a shard is computed"),
        (writes, "a.mean is written while a shard is computed"),
        (counts, "is written while a shard is computed"),
    ],
)
@pytest.mark.parametrize("towers", [1, 2])
def test_a_loss_that_writes_is_refused_before_training(
    act: Callable[[quorate.Shared], None], message: str, towers: int
) -> None:
    shared = quorate.Shared("a", beta=0.5, mean=torch.zeros(2), teacher=nn.BatchNorm1d(4))

    def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        act(shared)
        return model(batch[0]).mean()

    training = trainer(loss, towers)
    with pytest.raises(SharedError, match=message):
        training.fit(ROWS)
    assert training.global_step == 0


def test_a_loss_that_calls_the_module_itself_is_refused() -> None:
    teacher = net().eval()
    shared = quorate.Shared("a", teacher=teacher)

    def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        return (model(batch[0]) - teacher(batch[0])).square().mean()

    with pytest.raises(SharedError, match="the module 'teacher' is called itself"):
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

    with pytest.raises(SharedError, match="read where rows are loaded"):
        trainer(lambda model, batch: model(batch).mean()).fit(Reads())
    assert shared.beta == 0.5  # here it may be read


# --- training -------------------------------------------------------------------------------------


class Course:
    """A loss of a student with a coefficient, a bank and a teacher, and what sets them."""

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
            for mine, theirs in zip(
                self.teacher.state_dict().values(), model.state_dict().values(), strict=True
            ):
                mine.copy_(theirs)

    def train(self, towers: int, updates: int = 6, **settings: Any) -> quorate.Trainer:
        training = trainer(self.loss, towers, **settings)
        for report in training.updates(ROWS, epochs=2):
            self.set(report.global_step, training.model)
            if report.global_step == updates:
                break
        return training


def by_hand() -> nn.Module:
    """The same in plain torch, shard by shard."""
    model, course = net(), Course()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = Plan(rows=24, batch_size=8, shards=1)
    for step in range(6):
        rows = torch.from_numpy(plan.batch(step))
        optimizer.zero_grad()
        course.loss(model, [tensor[rows] for tensor in ROWS.tensors]).backward()
        optimizer.step()
        course.set(step + 1, model)
    return model


def test_it_trains_as_a_plain_loop_does() -> None:
    trained = front_door.trainer(
        net,
        (course := Course()).loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        batch_size=8,
        shards=1,
        devices=["cpu"],
    )
    for report in trained.updates(ROWS, epochs=2):
        course.set(report.global_step, trained.model)
    expected = by_hand()
    for name, tensor in trained.model.state_dict().items():
        torch.testing.assert_close(tensor, expected.state_dict()[name], rtol=1e-5, atol=1e-6)


def test_towers_have_the_same_bits() -> None:
    strict = quorate.Compute(strict=True)  # nobody doubts what is shared
    digests = {digest_of(Course().train(towers, compute=strict)) for towers in (1, 2, 3)}
    assert len(digests) == 1


@pytest.mark.parametrize("update", ["async", "bounded:2", "quorum:3"])
def test_a_shard_reads_one_version_while_updates_go_on(update: str) -> None:
    shared = quorate.Shared("a", number=0, tensor=torch.zeros(1000))

    def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        before = shared.number
        loss = (model(batch[0]) - batch[1]).square().mean()
        assert shared.number == before
        assert (shared.tensor == before).all()
        return loss

    training = trainer(loss, 3, update=update)
    for report in training.updates(ROWS, epochs=6):
        shared.number = report.global_step
        shared.tensor.fill_(report.global_step)


def test_an_evaluation_between_updates_reads_what_was_just_set() -> None:
    shared = quorate.Shared("a", beta=1.0)

    def loss(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, Any]:
        return {"loss": model(batch[0]).mean(), "beta": shared.beta}

    training = trainer(loss, 2)
    for report in training.updates(ROWS, steps=2):
        shared.beta = 2.0 + report.global_step
        assert training.evaluate(ROWS)["beta"] == shared.beta


# --- checkpoints ----------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [1, 4])
def test_a_resume_on_another_number_of_towers_goes_on_with_it(tmp_path: Any, stop: int) -> None:
    whole = digest_of(Course().train(1))
    first = Course()
    first.train(2, stop, run_dir=tmp_path).save()
    second = Course()
    resumed = second.train(3, run_dir=tmp_path)
    assert resumed.global_step == 6
    assert digest_of(resumed) == whole


def test_an_evaluation_of_a_checkpoint_has_it_too(tmp_path: Any) -> None:
    first = Course()
    training = first.train(2, 3, run_dir=tmp_path)
    training.save()
    expected = training.evaluate(ROWS)
    second = Course()
    assert trainer(second.loss, 1, run_dir=tmp_path).evaluate(ROWS) == expected
    assert second.shared.beta == 0.3


def saved(path: Any, **values: Any) -> None:
    shared = quorate.Shared("a", **values)
    training = trainer(lambda model, batch: model(batch[0]).mean(), run_dir=path)
    training.fit(ROWS, steps=1)
    del shared


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ({"x": 1}, {"x": torch.ones(1)}, "a.x: the checkpoint has a number or a text"),
        ({"x": torch.ones(1)}, {"x": 1}, "a.x: the checkpoint has tensors, the script a int"),
        ({"x": nn.Linear(1, 1)}, {"x": nn.Linear(2, 1)}, r"a.x.weight: the checkpoint has \(1, 1"),
    ],
)
def test_a_value_of_another_kind_is_refused_at_a_resume(
    tmp_path: Any, before: dict[str, Any], after: dict[str, Any], message: str
) -> None:
    saved(tmp_path, **before)
    with pytest.raises(MisfitError, match=message):
        saved(tmp_path, **after)


def test_what_is_new_or_gone_is_said_at_a_resume(tmp_path: Any, capsys: Any) -> None:
    saved(tmp_path, x=1, y=torch.ones(1))
    capsys.readouterr()
    other = quorate.Shared("b", z=1)
    training = trainer(lambda model, batch: model(batch[0]).mean(), run_dir=tmp_path)
    training.fit(ROWS, steps=2)
    said = "".join(capsys.readouterr())
    assert "Shared 'a' was saved and is made no more: it is left out" in said
    assert "Shared b.z was not saved: it is as the script makes it" in said
    del other
