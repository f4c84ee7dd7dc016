"""Models whose copy is not a copy: something in them, or in the loss, holds the original."""

from __future__ import annotations

import types
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from case import REFUSED, SAID, SAME, Case, case, cross_entropy, mlp, vectors
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.nn.utils import weight_norm as old_weight_norm

ANY = (SAME, SAID, REFUSED)


@case
def penalty_over_the_global_model() -> Case:
    net = mlp()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        penalty = sum(p.square().sum() for p in net.parameters())
        return cross_entropy(model, batch) + 0.05 * penalty

    return Case(net, loss, vectors(), outcomes=ANY)


@case
def loss_uses_the_global_model() -> Case:
    net = mlp()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(net(batch[0]), batch[1])

    return Case(net, loss, vectors(), outcomes=ANY)


@case
def lambda_holds_a_layer() -> Case:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 3)
            self.twice = lambda x: self.a(torch.tanh(self.a(x)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.twice(x))

    return Case(Model(), cross_entropy, vectors(), outcomes=ANY)


@case
def patched_forward() -> Case:
    model = mlp()
    layer = model[0]

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight * 0.5, self.bias)

    layer.forward = types.MethodType(forward, layer)
    return Case(model, cross_entropy, vectors(), outcomes=ANY)


@case
def partial_holds_the_layer() -> Case:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 3)
            self.first = partial(F.linear, weight=self.a.weight)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(torch.tanh(self.first(x)))

    return Case(Model(), cross_entropy, vectors(), outcomes=ANY)


@case
def hook_holds_another_layer() -> Case:
    model = mlp()
    first, last = model[0], model[2]
    last.register_forward_pre_hook(lambda module, args: (args[0] * first.weight.mean(),))
    return Case(model, cross_entropy, vectors(), outcomes=ANY)


@case
def weight_norm_of_old() -> Case:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layer = old_weight_norm(nn.Linear(8, 16))
    return Case(
        nn.Sequential(layer, nn.ReLU(), nn.Linear(16, 3)), cross_entropy, vectors(), outcomes=ANY
    )


@case
def spectral_norm_of_old() -> Case:
    layer = old_spectral_norm(nn.Linear(8, 16))
    model = nn.Sequential(layer, nn.ReLU(), nn.Linear(16, 3))
    return Case(model, cross_entropy, vectors(), plain=False, outcomes=ANY)


@case
def pruned() -> Case:
    model = mlp()
    prune.l1_unstructured(model[0], "weight", amount=0.5)
    return Case(model, cross_entropy, vectors(), outcomes=ANY)


@case
def scripted() -> Case:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.jit.script(mlp())
    return Case(model, cross_entropy, vectors(), outcomes=ANY)


@case
def uncopyable_member() -> Case:
    import threading

    class Locked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.lock = mlp(), threading.Lock()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with self.lock:
                return self.net(x)

    return Case(Locked(), cross_entropy, vectors(), outcomes=ANY)


@case
def module_outside_of_the_model() -> Case:
    """A loss with a trained part that the model does not have."""
    head = nn.Linear(3, 3)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(head(model(batch[0])), batch[1])

    return Case(mlp(), loss, vectors(), outcomes=ANY)


@case
def perceptual_loss_with_frozen_net() -> Case:
    """A frozen network outside of the model, in evaluation mode: sound."""
    judge = nn.Sequential(nn.Linear(3, 8), nn.ReLU()).eval().requires_grad_(False)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        out = model(batch[0])
        return F.cross_entropy(out, batch[1]) + 0.1 * judge(out).mean()

    return Case(mlp(), loss, vectors())
