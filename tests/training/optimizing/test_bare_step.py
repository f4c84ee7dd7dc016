"""A step is made bare only where nothing around it does anything."""

from __future__ import annotations

from collections.abc import Iterator
from functools import wraps

import pytest
import torch
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from quorate.replica.torch_internals import has_step_hooks
from quorate.training.optimizing.bare_step import bare_step
from quorate.training.optimizing.known_optimizers import ELEMENTWISE


def made(kind: type[Optimizer] = Adam) -> Optimizer:
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    return kind([parameter], lr=0.5)  # type: ignore[call-arg]


def step(optimizer: Optimizer) -> None:
    """As ``FlatOptimizer`` does."""
    (bare_step(optimizer) or optimizer.step)()


@pytest.mark.parametrize("kind", sorted(ELEMENTWISE, key=lambda kind: kind.__name__))
def test_a_bare_step_is_the_step(kind: type[Optimizer]) -> None:
    bare, plain = made(kind), made(kind)
    assert bare_step(bare) is not None
    for _ in range(3):
        step(bare)
        plain.step()
    (mine,), (theirs,) = bare.param_groups[0]["params"], plain.param_groups[0]["params"]
    assert torch.equal(mine, theirs)
    assert not torch.equal(mine, torch.ones(3))


@pytest.mark.parametrize("when", ["pre", "post"])
def test_hooks_of_an_optimizer_are_called(when: str) -> None:
    optimizer, called = made(), list[str]()
    getattr(optimizer, f"register_step_{when}_hook")(lambda *_: called.append("it"))
    assert has_step_hooks(optimizer)
    step(optimizer)
    assert called == ["it"]


@pytest.fixture(params=[register_optimizer_step_pre_hook, register_optimizer_step_post_hook])
def called(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    found = list[str]()
    handle = request.param(lambda *_: found.append("all"))
    yield found
    handle.remove()


def test_hooks_of_all_optimizers_are_called(called: list[str]) -> None:
    step(made(AdamW))
    assert called == ["all"]


def test_a_schedule_sees_steps() -> None:
    optimizer = made()
    schedule = StepLR(optimizer, 1)
    step(optimizer)
    schedule.step()  # it would warn, and a warning is an error here


def test_a_profiler_is_told_of_a_step() -> None:
    optimizer = made()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(optimizer)
    assert any("Optimizer.step#Adam.step" in event.key for event in profile.key_averages())


def test_what_user_code_has_put_around_a_class_s_step_is_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    optimizer, seen = made(), list[object]()
    inner = Adam.step

    @wraps(inner)
    def around(self: Optimizer) -> None:
        seen.append(self)
        inner(self)

    monkeypatch.setattr(Adam, "step", around)
    step(optimizer)
    assert seen == [optimizer]
