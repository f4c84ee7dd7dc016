"""Between two updates, and in the optimizer: by odd means, and with random numbers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from case import REFUSED, SAID, SAME, Case, case, cross_entropy, mlp, vectors
from torch import nn

from cases.callbacks import After, changed


@case
def exchanges_two_layers_by_data() -> Case:
    """As in training of populations: each one's values are read from the other's memory."""

    class Twins(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(torch.tanh(self.a(x)) - torch.sin(self.b(x)))

    def change(model: Any, _: Any, n: int) -> None:
        if n % 2 == 0:
            model.a.weight.data, model.b.weight.data = model.b.weight.data, model.a.weight.data

    return changed(change, Twins())


@case
def noise_from_torch_in_a_callback() -> Case:
    def change(model: nn.Module, _: Any, n: int) -> None:
        for p in model.parameters():
            p.data.add_(torch.randn_like(p), alpha=0.01)

    made = changed(change)
    made.plain = False  # the numbers are others
    return made


@case
def noise_from_numpy_in_a_callback() -> Case:
    def change(model: nn.Module, _: Any, n: int) -> None:
        for p in model.parameters():
            p.data.add_(0.01 * float(np.random.standard_normal()) + 0.01 * random.random())

    made = changed(change)
    made.plain = False
    made.outcomes, made.names = (SAID,), "NumPy"
    return made


class Langevin(torch.optim.Optimizer):
    """Steps by the gradient and noise."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"]).add_(torch.randn_like(p), alpha=0.01)


@case
def langevin() -> Case:
    return Case(mlp(), cross_entropy, vectors(), Langevin, plain=False)


@case
def optimizer_swapped_its_groups_midway() -> Case:
    """Moves a layer from one group to another, as when layers are warmed up in turn."""
    held: list[torch.optim.Optimizer] = []

    def make(params: Any) -> torch.optim.Optimizer:
        groups = [{"params": params[:2], "lr": 0.01}, {"params": params[2:], "lr": 0.1}]
        held.append(torch.optim.SGD(groups, momentum=0.9))
        return held[-1]

    def change(model: Any, _: Any, n: int) -> None:
        if n == 4:
            first, second = held[-1].param_groups
            second["params"].append(first["params"].pop())

    return Case(
        mlp(), cross_entropy, vectors(), make, callbacks=[After(change)], after=change,
        outcomes=(SAME, SAID, REFUSED), names="group",
    )  # fmt: skip


@case
def momentum_reset_in_a_callback() -> Case:
    """Clears the optimizer's state by hand."""
    held: list[torch.optim.Optimizer] = []

    def make(params: Any) -> torch.optim.Optimizer:
        held.append(torch.optim.Adam(params, lr=0.01))
        return held[-1]

    def change(model: Any, _: Any, n: int) -> None:
        if n in (3, 7):
            held[-1].state.clear()

    return Case(mlp(), cross_entropy, vectors(), make, callbacks=[After(change)], after=change)


@case
def moments_scaled_in_a_callback() -> Case:
    """Finds them by the model's parameters."""
    held: list[torch.optim.Optimizer] = []

    def make(params: Any) -> torch.optim.Optimizer:
        held.append(torch.optim.SGD(params, lr=0.05, momentum=0.9))
        return held[-1]

    def change(model: Any, _: Any, n: int) -> None:
        for p in model.parameters():
            if p in held[-1].state:
                held[-1].state[p]["momentum_buffer"].mul_(0.5)

    return Case(
        mlp(), cross_entropy, vectors(), make, callbacks=[After(change)], after=change,
        outcomes=(SAME, SAID, REFUSED), names="state",
    )  # fmt: skip


@case
def a_hook_of_the_step_projects_rows() -> Case:
    """After each step: by the optimizer's own parameters, which have the shapes of the model's."""

    def make(params: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.Adam(params, lr=0.01)

        @torch.no_grad()
        def project(optimizer: Any, _arguments: Any, _words: Any) -> None:
            for p in optimizer.param_groups[0]["params"]:
                if p.ndim > 1:
                    p.copy_(torch.renorm(p, 2, 0, 0.3))

        optimizer.register_step_post_hook(project)
        return optimizer

    return Case(mlp(), cross_entropy, vectors(), make)


@case
def swaps_in_a_new_parameter() -> Case:
    def change(model: Any, _: Any, n: int) -> None:
        if n == 5:
            model[0].weight = nn.Parameter(model[0].weight.detach() * 0.5)

    made = changed(change)
    made.outcomes, made.names = (REFUSED,), "0.weight"
    return made


@case
def registers_a_hook_midway() -> Case:
    """A forward hook from the fourth update on: workers' modules have none."""

    def change(model: Any, _: Any, n: int) -> None:
        if n == 4:
            model[0].register_forward_hook(lambda module, args, out: out * 0.5)

    made = changed(change)
    made.outcomes, made.names = (SAME, SAID, REFUSED), "hook"
    return made


@case
def replaces_a_layer_midway() -> Case:
    """An activation is exchanged for another one."""

    def change(model: Any, _: Any, n: int) -> None:
        if n == 4:
            model[1] = nn.Tanh()

    made = changed(change)
    made.outcomes, made.names = (SAME, SAID, REFUSED), "1"
    return made
