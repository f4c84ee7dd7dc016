"""Gradients that are missing, hooked, or not what plain torch would give."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from case import REFUSED, SAME, Case, case, cross_entropy, mlp, vectors
from torch import nn


class Experts(nn.Module):
    """Routes a whole batch to one expert, by its first number."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(experts))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        which = int(x[0, 0].abs() * 10) % len(self.experts)
        return self.head(torch.relu(self.experts[which](x)))


@case
def experts_sgd_momentum_decay() -> Case:
    make = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1)
    return Case(Experts(8), cross_entropy, vectors(), make)


@case
def experts_adam() -> Case:
    return Case(Experts(8), cross_entropy, vectors(), partial(torch.optim.Adam, lr=1e-2))


@case
def experts_adamw_clipped() -> Case:
    make = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
    return Case(Experts(8), cross_entropy, vectors(), make, optimize={"clip_norm": 0.3})


@case
def experts_rmsprop_double() -> Case:
    data = vectors()
    data.tensors = (data.tensors[0].double(), data.tensors[1])
    make = partial(torch.optim.RMSprop, lr=1e-3, momentum=0.5)
    return Case(Experts(8).double(), cross_entropy, data, make)


@case
def branch_never_used() -> Case:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.spare = mlp(), nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

    make = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.5)
    return Case(Unused(), cross_entropy, vectors(), make)


@case
def token_routed_experts() -> Case:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(8, 4)
            self.experts = nn.ModuleList(nn.Linear(8, 3) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gates = self.router(x).softmax(1)
            best = gates.argmax(1)
            out = x.new_zeros(len(x), 3)
            for n, expert in enumerate(self.experts):
                rows = (best == n).nonzero()[:, 0]
                if len(rows):
                    out = out.index_add(0, rows, expert(x[rows]) * gates[rows, n : n + 1])
            return out

    make = partial(torch.optim.Adam, lr=1e-2)
    return Case(Routed(), cross_entropy, vectors(), make)


@case
def clipping_tensor_hook() -> Case:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        hidden = model[1](model[0](batch[0]))
        hidden.register_hook(lambda g: g.clamp(-0.01, 0.01))
        return F.cross_entropy(model[2](hidden), batch[1])

    return Case(mlp(), loss, vectors())


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g / (1 + 10 * g.abs())


@case
def non_linear_backward() -> Case:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model[2](Sign.apply(model[1](model[0](batch[0])))), batch[1])

    return Case(mlp(), loss, vectors())


@case
def module_backward_hook() -> Case:
    model = mlp()
    model[0].register_full_backward_hook(lambda m, gi, go: (gi[0],) if gi[0] is None else gi)
    return Case(model, cross_entropy, vectors())


@case
def parameter_hook() -> Case:
    model = mlp()
    model[0].weight.register_hook(lambda g: g * 0.5)
    return Case(model, cross_entropy, vectors(), outcomes=(SAME, REFUSED), names="hook")


@case
def post_accumulate_hook() -> Case:
    model = mlp()

    def halve(parameter: torch.Tensor) -> None:
        parameter.grad.mul_(0.5)

    model[0].weight.register_post_accumulate_grad_hook(halve)
    return Case(model, cross_entropy, vectors(), outcomes=(SAME, REFUSED), names="hook")


@case
def loss_calls_backward_itself() -> Case:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        value = cross_entropy(model, batch)
        value.backward(retain_graph=True)
        return value

    return Case(mlp(), loss, vectors(), plain=False, outcomes=(SAME, REFUSED, "said"))
