"""Changes by user code between two updates; more of them: ``training/test_user_changes.py``."""

import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from case import REFUSED, SAID, Case, between, case, mlp, pairs
from torch import Tensor, nn
from torch.optim import Optimizer

# --- trained parameters ---------------------------------------------------------------------------


@between(SAID, "NumPy")
def noise_from_numpy_in_a_callback(model: nn.Module, _: Any, n: int) -> None:
    for p in model.parameters():
        p.data.add_(0.01 * float(np.random.standard_normal()) + 0.01 * random.random())


@between(REFUSED, "0.weight")
def swaps_in_a_new_parameter(model: Any, _: Any, n: int) -> None:
    if n == 5:
        model[0].weight = nn.Parameter(model[0].weight.detach() * 0.5)


# --- teachers -------------------------------------------------------------------------------------


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


# --- the optimizer held by the script -------------------------------------------------------------


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


case(lambda: Case(optimizer=projecting), "a_hook_of_the_step_projects_rows")
