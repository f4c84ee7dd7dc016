"""Gradients: missing, hooked, or different from plain torch's."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from case import REFUSED, SAME, Case, case, cross_entropy, loss, mlp, module
from torch import Tensor, nn

AdamW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.5)


@module("branch_never_used", says="no gradient in step 0, so unchanged: sp", optimizer=AdamW)
class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.spare = mlp(), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


# --- user code on gradients sees the gradients of the mean ----------------------------------------


class NonLinear(torch.autograd.Function):
    """Bounds a gradient, and the gradient's norm, on the way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g / (1 + 10 * g.abs()) * (0.05 / (g.norm() + 0.05))


@loss()
def non_linear_backward(model: Any, batch: Any) -> Tensor:
    hidden: Tensor = NonLinear.apply(model[1](model[0](batch[0])))  # type: ignore[no-untyped-call]
    return F.cross_entropy(model[2](hidden), batch[1])


@case
def post_accumulate_hook() -> Case:
    model = mlp()
    model[0].weight.register_post_accumulate_grad_hook(lambda parameter: parameter.grad.mul_(0.5))
    return Case(REFUSED, "a hook on 0.weight", model=model)


@loss((SAME, REFUSED), plain=False)
def loss_calls_backward_itself(model: nn.Module, batch: Any) -> Tensor:
    value = cross_entropy(model, batch)
    value.backward(retain_graph=True)
    return value


@loss()
def gradient_penalty(model: nn.Module, batch: Any) -> Tensor:
    x = batch[0].clone().requires_grad_()
    out = torch.tanh(model(x))
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return F.cross_entropy(out, batch[1]) + 0.1 * grad.square().sum(1).mean()
