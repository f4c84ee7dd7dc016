"""Buffers: averages, counters, statistics that ought to stay, modes."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from case import SAID, SAME, Case, case, cross_entropy, images, mlp, vectors
from torch import nn


@case
def batchnorm_kept_in_evaluation() -> Case:
    """``train()`` overridden, as in detection backbones."""

    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU())
            self.head = nn.Linear(16, 3)

        def train(self, mode: bool = True) -> Frozen:
            super().train(mode)
            self.body[1].eval()
            return self

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(x))

    return Case(Frozen(), cross_entropy, vectors())


@case
def batchnorm_in_evaluation_from_outside() -> Case:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    model[1].eval()
    return Case(model, cross_entropy, vectors(), plain=False)


@case
def cumulative_batchnorm() -> Case:
    norm = nn.BatchNorm1d(16, momentum=None)
    model = nn.Sequential(nn.Linear(8, 16), norm, nn.ReLU(), nn.Linear(16, 3))
    return Case(model, cross_entropy, vectors())


@case
def double_buffer_that_nobody_changes() -> Case:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()
            self.register_buffer("table", torch.rand(8, dtype=torch.float64) / 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x * self.table.float())

    return Case(Table(), cross_entropy, vectors())


@case
def complex_buffer() -> Case:
    class Phase(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()
            self.register_buffer("phase", torch.polar(torch.ones(8), torch.arange(8) / 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net((x * self.phase).real)

    return Case(Phase(), cross_entropy, vectors())


@case
def counts_rows_in_an_integer_buffer() -> Case:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()
            self.register_buffer("classes", torch.zeros(3, dtype=torch.long))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.net(x)
            self.classes += torch.bincount(out.argmax(1), minlength=3)
            return out

    return Case(Counts(), cross_entropy, vectors(), plain=False)


@case
def non_persistent_statistic() -> Case:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()
            self.register_buffer("mean", torch.zeros(8), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                self.mean.lerp_(x.mean(0), 0.1)
            return self.net(x - self.mean)

    return Case(Hidden(), cross_entropy, vectors())


@case
def state_dict_that_leaves_a_layer_out() -> Case:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 3)

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            full = super().state_dict(*args, **kwargs)
            return type(full)((k, v) for k, v in full.items() if not k.startswith("head"))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.relu(self.body(x)))

    return Case(Partly(), cross_entropy, vectors(), outcomes=(SAME, SAID, "refused"))


@case
def ema_teacher_in_forward() -> Case:
    """A teacher that follows by ``.data`` in every training forward."""

    class Teaching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = mlp(), mlp()
            self.teacher.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                for t, s in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                    t.data = t.data * 0.9 + s.data * 0.1
            return self.student(x) + 0.1 * self.teacher(x)

    return Case(Teaching(), cross_entropy, vectors(), plain=False, outcomes=(SAME, SAID))


@case
def running_norm_of_ones_own() -> Case:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(8))
            self.register_buffer("var", torch.ones(8))
            self.net = mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()
                self.var = 0.9 * self.var + 0.1 * x.var(0).detach()
            return self.net((x - self.mean) / (self.var + 1e-5).sqrt())

    return Case(Norm(), cross_entropy, vectors())


@case
def frozen_backbone() -> Case:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 2)
    )
    model[0].requires_grad_(False)
    make = partial(torch.optim.Adam, lr=1e-2)
    return Case(model, cross_entropy, images(), make)
