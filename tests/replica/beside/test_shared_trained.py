"""Training with a ``Shared``: as a plain loop, the same bits on towers and after a resume."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import front_door
from support.messages import expect_error
from support.shared_values import ROWS, net, trainer
from torch import nn

import quorate
from quorate.coordination.plan import Plan
from quorate.errors import MisfitError
from quorate.replica.digest import digest


def digest_of(trained: quorate.Trainer) -> str:
    return digest(trained.model.state_dict().items())


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
    ("before", "after"),
    [
        ({"x": 1}, {"x": torch.ones(1)}),
        ({"x": torch.ones(1)}, {"x": 1}),
        ({"x": nn.Linear(1, 1)}, {"x": nn.Linear(2, 1)}),
    ],
)
def test_a_value_of_another_kind_is_refused_at_a_resume(
    tmp_path: Any, before: dict[str, Any], after: dict[str, Any]
) -> None:
    saved(tmp_path, **before)
    with expect_error(MisfitError):
        saved(tmp_path, **after)


def test_what_is_new_or_gone_is_said_at_a_resume(tmp_path: Any, capsys: Any) -> None:
    saved(tmp_path, x=1, y=torch.ones(1))
    capsys.readouterr()
    other = quorate.Shared("b", z=1)
    training = trainer(lambda model, batch: model(batch[0]).mean(), run_dir=tmp_path)
    training.fit(ROWS, steps=2)
    said = "".join(capsys.readouterr())
    assert "the checkpoint has Shared 'a', the script does not; the values are dropped" in said
    assert "the checkpoint lacks Shared b.z; the script's value is used" in said
    del other
