"""Changes by user code between two updates: parameters, buffers, attributes, the optimizer."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from case import REFUSED, SAID, SAME, After, Case, Net, between, case, mlp, pairs
from torch import Tensor, nn
from torch.optim import Optimizer

ANY = (SAME, SAID, REFUSED)

# --- trained parameters ---------------------------------------------------------------------------


@between()
def clamp_by_data_assignment(model: nn.Module, _: Any, n: int) -> None:
    for p in model.parameters():
        p.data = p.data.clamp(-0.2, 0.2)


@between(SAID, "NumPy")
def noise_from_numpy_in_a_callback(model: nn.Module, _: Any, n: int) -> None:
    for p in model.parameters():
        p.data.add_(0.01 * float(np.random.standard_normal()) + 0.01 * random.random())


# A plain loop here looks for trained parameters only once.
@between(ANY, "requires_grad", plain=False)
def gradual_unfreezing(model: Any, _: Any, n: int) -> None:
    if n in (3, 6):
        model[0].requires_grad_(n == 6)


@between(REFUSED, "0.weight")
def swaps_in_a_new_parameter(model: Any, _: Any, n: int) -> None:
    if n == 5:
        model[0].weight = nn.Parameter(model[0].weight.detach() * 0.5)


# --- teachers, buffers, attributes, modules -------------------------------------------------------


class Taught(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = mlp(), mlp()
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.student(x)


def consistency(model: Any, batch: Any) -> Tensor:
    out = model(batch[0])
    return F.cross_entropy(out, batch[1]) + F.mse_loss(out, model.teacher(batch[0]))


@between(model=Taught, loss=consistency)
def teacher_by_data_in_callback(model: Any, _: Any, n: int) -> None:
    for t, s in pairs(model.teacher, model.student):
        t.data = t.data * 0.9 + s.data * 0.1


class Annealed(Net):
    gamma = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("beta", torch.tensor(0.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * (1 + self.beta) + self.gamma * x[:, :3]


@between(model=Annealed)
def buffer_replaced_in_callback(model: Any, _: Any, n: int) -> None:
    model.beta = torch.tensor(n / 10)


@between((SAME, SAID), "gamma", model=Annealed)
def attribute_set_in_callback(model: Any, _: Any, n: int) -> None:
    model.gamma = n / 10


@between(ANY, "1")
def replaces_a_layer_midway(model: Any, _: Any, n: int) -> None:
    """Exchange an activation for another."""
    if n == 4:
        model[1] = nn.Tanh()


# --- the optimizer held by the script -------------------------------------------------------------


def held(
    make: Callable[[Any], Optimizer], outcome: Any = SAME, names: str = ""
) -> Callable[[Any], Any]:
    """List a callback's effect on an optimizer as a case of the same name."""

    def listed(change: Callable[[Optimizer, nn.Module, int], None]) -> Any:
        def made() -> Case:
            optimizers: list[Optimizer] = []

            def making(params: Any) -> Optimizer:
                optimizers.append(make(params))
                return optimizers[-1]

            def after(model: nn.Module, _: Any, n: int) -> None:
                change(optimizers[-1], model, n)

            more: Any = {"callbacks": [After(after)], "after": after}
            return Case(outcome, names, optimizer=making, **more)

        return case(made, change.__name__)

    return listed


def projecting(params: Any) -> Optimizer:
    """Project by a hook, and by the optimizer's own parameters, with the shapes of the model's."""
    optimizer = torch.optim.Adam(params, lr=0.01)

    @torch.no_grad()
    def project(optimizer: Any, _arguments: Any, _words: Any) -> None:
        for p in optimizer.param_groups[0]["params"]:
            if p.ndim > 1:
                p.copy_(torch.renorm(p, 2, 0, 0.3))

    optimizer.register_step_post_hook(project)
    return optimizer


momentum = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
case(lambda: Case(optimizer=projecting), "a_hook_of_the_step_projects_rows")


@held(momentum)
def learning_rate_set_by_callback(optimizer: Optimizer, _: Any, n: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.1 / (1 + n // 3)


@held(momentum, ANY, "state")
def moments_scaled_in_a_callback(optimizer: Optimizer, model: nn.Module, n: int) -> None:
    """Finds moments by the model's parameters."""
    for p in model.parameters():
        if p in optimizer.state:
            optimizer.state[p]["momentum_buffer"].mul_(0.5)
