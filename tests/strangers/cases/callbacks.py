"""Callbacks that change the model, its frozen parts, its buffers, the optimizer, or attributes."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from case import SAID, SAME, Case, case, cross_entropy, mlp, vectors
from torch import nn

import quorate


class After(quorate.Callback):
    """Calls a function after each update: ``change(model, optimizer or None, n)``."""

    def __init__(self, change: Any) -> None:
        self.change = change

    def started(self, trainer: Any) -> None:
        self.trainer = trainer

    def updated(self, report: Any) -> None:
        self.change(self.trainer.model, None, report.global_step)


def changed(change: Any, model: nn.Module | None = None, **more: Any) -> Case:
    options: dict[str, Any] = {"optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9)} | more
    return Case(
        model or mlp(), options.pop("loss", cross_entropy), vectors(),
        callbacks=[After(change)], after=change, **options,
    )  # fmt: skip


@case
def clamp_by_data_assignment() -> Case:
    def change(model: nn.Module, _: Any, n: int) -> None:
        for p in model.parameters():
            p.data = p.data.clamp(-0.2, 0.2)

    return changed(change)


@case
def clamp_by_data_in_place() -> Case:
    def change(model: nn.Module, _: Any, n: int) -> None:
        for p in model.parameters():
            p.data.clamp_(-0.2, 0.2)

    return changed(change)


@case
def prune_small_every_third() -> Case:
    @torch.no_grad()
    def change(model: nn.Module, _: Any, n: int) -> None:
        if n % 3 == 0:
            for p in model.parameters():
                p.mul_(p.abs() > 0.05)

    return changed(change)


@case
def load_state_dict_midway() -> Case:
    kept: dict[str, Any] = {}

    def change(model: nn.Module, _: Any, n: int) -> None:
        if n == 3:
            kept.update({k: v.clone() for k, v in model.state_dict().items()})
        if n == 4:
            model.load_state_dict(kept)

    return changed(change)


@case
def vector_to_parameters() -> Case:
    def change(model: nn.Module, _: Any, n: int) -> None:
        from torch.nn.utils import parameters_to_vector, vector_to_parameters

        vector = parameters_to_vector(model.parameters()).detach()
        vector_to_parameters(vector * 0.99, model.parameters())

    return changed(change)


class Taught(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = mlp(), mlp()
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.student(x)


def consistency(model: Any, batch: Any) -> torch.Tensor:
    out = model(batch[0])
    return F.cross_entropy(out, batch[1]) + F.mse_loss(out, model.teacher(batch[0]))


@case
def teacher_by_data_in_callback() -> Case:
    def change(model: Any, _: Any, n: int) -> None:
        for t, s in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
            t.data = t.data * 0.9 + s.data * 0.1

    return changed(change, Taught(), loss=consistency)


@case
def teacher_in_place_in_callback() -> Case:
    def change(model: Any, _: Any, n: int) -> None:
        for t, s in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
            t.data.mul_(0.9).add_(s.data, alpha=0.1)

    return changed(change, Taught(), loss=consistency)


@case
def teacher_lerp_in_callback() -> Case:
    @torch.no_grad()
    def change(model: Any, _: Any, n: int) -> None:
        for t, s in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
            t.lerp_(s, 0.1)

    return changed(change, Taught(), loss=consistency)


class Annealed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.register_buffer("beta", torch.tensor(0.0))
        self.gamma = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) * (1 + self.beta) + self.gamma * x[:, :3]


@case
def buffer_filled_in_callback() -> Case:
    def change(model: Any, _: Any, n: int) -> None:
        model.beta.fill_(n / 10)

    return changed(change, Annealed())


@case
def buffer_replaced_in_callback() -> Case:
    def change(model: Any, _: Any, n: int) -> None:
        model.beta = torch.tensor(n / 10)

    return changed(change, Annealed())


@case
def attribute_set_in_callback() -> Case:
    def change(model: Any, _: Any, n: int) -> None:
        model.gamma = n / 10

    made = changed(change, Annealed())
    made.outcomes, made.names = (SAME, SAID), "gamma"
    return made


@case
def gradual_unfreezing() -> Case:
    model = mlp()

    def change(model: Any, _: Any, n: int) -> None:
        if n == 4:
            model[0].requires_grad_(False)
        if n == 8:
            model[0].requires_grad_(True)

    made = changed(change, model)
    made.plain = False  # the plain loop here asks once which parameters are trained
    made.outcomes, made.names = (SAME, SAID, "refused"), "requires_grad"
    return made


@case
def global_dict_annealed() -> Case:
    """A coefficient in a dict of the script: workers never see what the callback does to it."""
    settings = {"beta": 0.0}

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        out = model(batch[0])
        return F.cross_entropy(out, batch[1]) + settings["beta"] * out.square().mean()

    def change(model: Any, _: Any, n: int) -> None:
        settings["beta"] = n / 10

    made = changed(change, loss=loss)
    made.outcomes, made.names = (SAID,), "settings"
    return made


@case
def swa_in_callback() -> Case:
    """Averages weights beside training, which nobody else reads."""
    from torch.optim.swa_utils import AveragedModel

    model = mlp()
    averaged = AveragedModel(model)

    def change(model: Any, _: Any, n: int) -> None:
        averaged.update_parameters(model)

    return changed(change, model)


@case
def early_reset_of_a_layer() -> Case:
    def change(model: Any, _: Any, n: int) -> None:
        if n == 5:
            with torch.random.fork_rng():
                torch.manual_seed(7)
                model[2].reset_parameters()

    return changed(change)
