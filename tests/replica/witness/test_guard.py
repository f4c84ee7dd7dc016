"""What shards write that is not theirs to write, for the first time in the middle of a run."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from support.messages import expect_error
from torch import nn

import quorate
from quorate.replica.notes import Notes
from quorate.replica.witness.guard import THEN_EVERY, Guard

X = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))


class Teaching(nn.Module):
    """A teacher that follows by ``.data``, in place, every third step."""

    steps: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(4, 1), nn.Linear(4, 1).requires_grad_(False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        if int(self.steps) % 3 == 0:
            for mine, its in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                mine.data.mul_(0.5).add_(its.data, alpha=0.5)
        y: torch.Tensor = self.student(x) + self.teacher(x)
        return y


class Shrinking(nn.Linear):
    """Shrinks what is trained every third step: all replicas have the same parameters."""

    steps: torch.Tensor

    def __init__(self) -> None:
        super().__init__(4, 1)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        if int(self.steps) % 3 == 0:
            self.weight.data.mul_(0.5)
        return super().forward(x)


class Tying(nn.Module):
    """Puts the weight of one layer into another, in every forward pass or a late one."""

    steps: torch.Tensor

    def __init__(self, first: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.first = first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if int(self.steps) >= self.first:
            self.b.weight = self.a.weight
        self.steps += 1
        y: torch.Tensor = self.b(self.a(x))
        return y


def trainer_of(model: nn.Module, workers: int) -> quorate.Trainer:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        value: torch.Tensor = model(batch).square().mean()
        return value

    return quorate.Trainer(
        model,
        loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        batch_size=8,
        shards=2,
        devices="cpu",
        workers=quorate.Workers(workers, engine="towers"),
    )


def train(model: nn.Module, workers: int) -> list[str]:
    found: list[str] = []
    for report in trainer_of(model, workers).updates(X, steps=6, shuffle=False):
        found += report.doubts
    return found


@pytest.mark.parametrize("workers", [1, 2])
def test_a_late_write_by_data_in_place_is_named_once(workers: int) -> None:
    (said,) = train(Teaching(), workers)
    assert said.startswith("forward writes teacher.weight (Linear), teacher.bias (Linear) now")


@pytest.mark.parametrize("workers", [1, 2])
def test_so_is_one_of_what_is_trained(workers: int) -> None:
    (said,) = train(Shrinking(), workers)
    assert said.startswith("forward writes weight (Shrinking) now and did not in the first shard")


def test_user_code_between_updates_may_write() -> None:
    class Names(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.data)

    trainer = trainer_of(Names(4, 1), 2)
    for report in trainer.updates(X, steps=6, shuffle=False):
        assert not report.doubts
        for parameter in trainer.model.parameters():
            parameter.data.mul_(0.9)


class Fades(quorate.Callback):
    def started(self, trainer: quorate.Trainer[Any, Any]) -> None:
        self.model: Any = trainer.model
        self.doubts: list[str] = []

    def updated(self, report: quorate.Report) -> None:
        self.doubts += report.doubts
        for parameter in self.model.frozen.parameters():
            parameter.data = parameter.data * 0.9
        time.sleep(0.03)  # meanwhile the tower that is late ends its shard


def test_a_callback_may_write_while_a_tower_computes_what_nobody_waits_for() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 1), "frozen": nn.Linear(4, 1).requires_grad_(False)})

    def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
        if threading.current_thread().name.endswith("-2"):
            time.sleep(0.01)  # another tower computes its shard too
        value: torch.Tensor = (model.a(batch) + model.frozen(batch)).square().mean()
        return value

    trainer = quorate.Trainer(
        model,
        loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        batch_size=8,
        shards=4,
        devices="cpu",
        workers=quorate.Workers(3, engine="towers"),
    )
    fades = Fades()
    trainer.fit(X, epochs=5, callbacks=[fades])
    assert not fades.doubts


@pytest.mark.parametrize("workers", [1, 2])
def test_a_late_write_of_what_is_frozen_is_named_once(workers: int) -> None:
    class Counting(nn.Linear):
        steps: torch.Tensor

        def __init__(self) -> None:
            super().__init__(4, 1)
            self.late = nn.Parameter(torch.zeros(()), requires_grad=False)
            self.register_buffer("steps", torch.zeros((), dtype=torch.long))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.steps += 1
            if int(self.steps) > 3:
                with torch.no_grad():
                    self.late.add_(1)
            return super().forward(x)

    (said,) = train(Counting(), workers)
    assert said.startswith("forward writes late (Counting) now and did not in the first shard")


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("first", [0, 3])
def test_another_parameter_in_the_place_of_one_is_refused(first: int, workers: int) -> None:
    with expect_error(quorate.errors.UserError, name="parameter 'b.weight'"):
        train(Tying(first), workers)


class Lazy(nn.Linear):
    """Makes a parameter when it sees its first rows; no optimizer has it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "scale"):
            self.scale = nn.Parameter(torch.rand(x.shape[1]))
        return super().forward(x * self.scale)


class LazyLayer(nn.Linear):
    """Likewise with a layer: each worker would draw its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "inner"):
            self.inner = nn.Linear(x.shape[1], 4)
        return super().forward(torch.tanh(self.inner(x)))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_parameter_that_forward_makes_is_refused(workers: int) -> None:
    with expect_error(quorate.errors.UserError, name="parameter 'scale'"):
        train(Lazy(4, 1), workers)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_layer_that_forward_makes_is_in_doubt(workers: int) -> None:
    said = train(LazyLayer(4, 1), workers)
    assert any("inner" in doubt for doubt in said), said


def test_a_parameter_of_a_late_shard_is_refused_too() -> None:
    model, notes = nn.Linear(3, 2), Notes()
    guard = Guard(model, (), notes)
    for _ in range(100):
        guard.require_same_objects()
    model.weight = nn.Parameter(torch.ones(2, 3))

    def look() -> None:
        for _ in range(THEN_EVERY):
            guard.require_same_objects()

    with expect_error(quorate.errors.UserError, name="parameter 'weight'"):
        look()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]
)
def test_values_are_looked_at_where_they_have_to_be(dtype: torch.dtype) -> None:
    for by_value in (False, True):
        notes, model = Notes(), nn.Module()
        # Not dense in its last axis.
        model.weight = weight = nn.Parameter(torch.ones(3, 5, dtype=dtype).t())
        guard = Guard(model, (), notes, by_value={id(weight)} if by_value else ())
        guard.begin(model)
        assert guard.is_kept()
        weight.data[1, 1] *= -1
        assert guard.is_kept() is not by_value
        assert bool(notes.doubts) is by_value
