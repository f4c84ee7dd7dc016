"""Optimizers within others, and state in odd places: carried through a resume, or named."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.messages import expect_error
from torch import nn
from torch.optim import SGD, Adam, Optimizer, lr_scheduler
from torch.utils.data import TensorDataset

import quorate
from quorate.errors import UserError

STEPS = 9
X = torch.randn(24, 5, generator=torch.Generator().manual_seed(0))
Y = torch.randn(24, 1, generator=torch.Generator().manual_seed(1))
Params = list[nn.Parameter]
MEMORY: dict[int, torch.Tensor] = {}


class Own(Optimizer):
    """What those below have in common: they say how far to go from a gradient."""

    def __init__(self, params: Params, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    def held(self) -> Params:
        return [p for group in self.param_groups for p in group["params"]]

    def moved(self, number: int, parameter: nn.Parameter) -> torch.Tensor:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for number, parameter in enumerate(self.held()):
            parameter.sub_(self.moved(number, parameter), alpha=self.param_groups[0]["lr"])


class Sharp(Optimizer):
    """Wraps one that has its groups, as sharpness-aware ones do."""

    def __init__(self, params: Params) -> None:
        super().__init__(params, {"lr": 0.05, "momentum": 0.9})
        self.base = SGD(self.param_groups, lr=0.05, momentum=0.9)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, *arguments: Any) -> None:
        (closure,) = arguments
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["before"] = p.clone()
                p.add_(p.grad, alpha=0.05)
        closure()
        for p, state in self.state.items():
            p.data = state["before"]
        self.base.step()

    def first_step(self) -> None:
        """Has it only to be known as what it is."""


class Ahead(Optimizer):
    """Wraps anything, and averages now and then."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner, self.count = inner, 0
        self.param_groups = inner.param_groups
        self.slow = [p.detach().clone() for p in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.inner.step(closure)
        self.count += 1
        if self.count % 2 == 0:
            for p, slow in zip(self.param_groups[0]["params"], self.slow, strict=True):
                p.copy_(slow.lerp_(p, 0.5))


class Chain(Own):
    """Several, in a list, and a schedule of its own."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self.chain = [
            SGD([p for p in params if p.ndim > 1], lr=0.05, momentum=0.9),
            Adam([p for p in params if p.ndim < 2], lr=0.05),
        ]
        self.schedule = lr_scheduler.CosineAnnealingLR(self.chain[0], 5)

    def step(self, closure: Any = None) -> None:
        for optimizer in self.chain:
            optimizer.step()
        self.schedule.step()


class Late(Own):
    """Makes what it keeps in its first step."""

    def moved(self, number: int, parameter: nn.Parameter) -> torch.Tensor:
        if not hasattr(self, "counts"):
            self.counts: Any = defaultdict(int)
        self.counts[number] += 1
        return parameter.grad / self.counts[number]  # type: ignore[operator]


class Noisy(Own):
    """Draws from torch's default generator, and from one of its own."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self.generator = torch.Generator().manual_seed(3)

    def moved(self, number: int, parameter: nn.Parameter) -> torch.Tensor:
        noise = torch.randn(parameter.shape, generator=self.generator)
        return parameter.grad + 0.1 * torch.randn_like(parameter) + 0.1 * noise  # type: ignore[operator]


CARRIED: dict[str, Callable[[Params], Optimizer]] = {
    "sharp": Sharp,
    "sharp within": lambda p: Ahead(Sharp(p)),
    "chain": Chain,
    "late": Late,
    "noisy": Noisy,
}


class OfClass(Own):
    count = 0

    def moved(self, number: int, parameter: nn.Parameter) -> torch.Tensor:
        OfClass.count += 1
        return parameter.grad / OfClass.count  # type: ignore[operator]


class OfScript(Own):
    def moved(self, number: int, parameter: nn.Parameter) -> torch.Tensor:
        kept = MEMORY.setdefault(number, torch.zeros_like(parameter))
        return kept.mul_(0.9).add_(parameter.grad)  # type: ignore[arg-type]


class OfParameter(Own):
    def moved(self, number: int, parameter: nn.Parameter) -> torch.Tensor:
        kept = vars(parameter).setdefault("kept", torch.zeros_like(parameter))
        return kept.mul_(0.9).add_(parameter.grad)  # type: ignore[no-any-return]


class Helper:
    def __init__(self) -> None:
        self.kept: dict[int, torch.Tensor] = {}


class OfHelper(Own):
    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self.helper = Helper()

    def moved(self, number: int, parameter: nn.Parameter) -> torch.Tensor:
        kept = self.helper.kept.setdefault(number, torch.zeros_like(parameter))
        return kept.mul_(0.9).add_(parameter.grad)  # type: ignore[arg-type]


def of_hook(params: Params) -> Optimizer:
    optimizer, seen = SGD(params, lr=0.05), [0]

    def slower(optimizer: Optimizer, _arguments: object, _words: object) -> None:
        seen[0] += 1
        optimizer.param_groups[0]["lr"] = 0.05 / seen[0]

    optimizer.register_step_post_hook(slower)
    return optimizer


NAMED: dict[str, tuple[Callable[[Params], Optimizer], str]] = {
    "class": (OfClass, "OfClass.count (class attribute)"),
    "script": (OfScript, "'MEMORY' (test_optimizers_of_odd_kinds.py)"),
    "parameter": (OfParameter, "attribute kept of parameter '0.weight'"),
    "helper": (OfHelper, "OfHelper.helper, a Helper,"),
    "hook": (of_hook, "'seen' in the closure of SGD._optimizer_step_post_hooks"),
}


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def trained(steps: int, make: Any, run_dir: Path | None = None, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    schedule = options.pop("schedule", None)
    trainer = quorate.Trainer(
        nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)),
        loss,
        optimizer=quorate.Optimize(make, schedule=schedule, ema_decay=0.9),
        batch_size=8,
        shards=2,
        devices="cpu",
        workers=quorate.Workers(2, engine="towers"),
        run_dir=None if run_dir is None else quorate.RunDir(run_dir, summary_every_s=None),
        **options,
    )
    trainer.fit(TensorDataset(X, Y), steps=steps)
    assert trainer.averaged_model is not None
    return nn.ModuleList([trainer.model, trainer.averaged_model])


@pytest.mark.parametrize("name", CARRIED)
def test_what_is_within_an_optimizer_goes_on_as_if_nothing_had_been(
    name: str, tmp_path: Path
) -> None:
    """Also what they share: a schedule reaches the groups of the one that is wrapped."""

    def schedule(optimizer: Optimizer) -> lr_scheduler.LRScheduler:
        return lr_scheduler.StepLR(optimizer, 2, 0.5)

    through = trained(STEPS, CARRIED[name], schedule=schedule)
    trained(3, CARRIED[name], tmp_path, schedule=schedule)
    resumed = trained(STEPS, CARRIED[name], tmp_path, schedule=schedule)
    for one, other in zip(resumed.parameters(), through.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", NAMED)
def test_state_where_nobody_saves_it_is_named(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    OfClass.count = 0
    MEMORY.clear()
    make, named = NAMED[name]
    trained(3, make, tmp_path)
    assert f"same bits: no, because {named} changes when the optimizer" in capsys.readouterr().out


@pytest.mark.parametrize("late", [False, True])
def test_an_optimizer_that_keeps_parameters_in_memory_of_its_own_is_refused(late: bool) -> None:
    """What it writes there would reach no worker."""

    class Flattens(Own):
        flat: torch.Tensor | None = None

        def __init__(self, params: Params) -> None:
            super().__init__(params)
            if not late:
                self.flatten()

        def flatten(self) -> None:
            self.flat, start = torch.cat([p.detach().reshape(-1) for p in self.held()]), 0
            for p in self.held():
                p.data = self.flat[start : start + p.numel()].view_as(p)
                start += p.numel()

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            if self.flat is None:
                self.flatten()
            assert self.flat is not None
            self.flat.sub_(torch.cat([p.grad.reshape(-1) for p in self.held()]), alpha=0.05)  # type: ignore[union-attr]

    with expect_error(UserError, name="optimizer"):
        trained(3, Flattens)


def test_where_no_closure_is_given_it_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    trained(3, Late, update="async")
    line = "Late.step() accepts a closure and receives none under async"
    assert line in capsys.readouterr().out
