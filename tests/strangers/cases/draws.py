"""Draws that are late, seldom, or not from the generators that are keyed."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from case import SAID, SAME, Case, case, cross_entropy, mlp, vectors
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

ANY = (SAME, SAID)


@case
def layer_drop_after_warm_up() -> Case:
    """Python's generator, from the time when the loss is small."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        value = cross_entropy(model, batch)
        if float(value.detach()) < 1.0 and random.random() < 0.5:
            return value * 0.5
        return value

    return Case(mlp(), loss, vectors(), plain=False, outcomes=ANY)


@case
def numpy_drawn_seldom() -> Case:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        if float(x[0, 0]) > 1.0:
            x = x + torch.from_numpy(np.random.normal(size=x.shape).astype(np.float32))
        return cross_entropy(model, (x, y))

    return Case(mlp(), loss, vectors(), plain=False, outcomes=ANY)


@case
def numpy_late_alone() -> Case:
    """NumPy draws from an update on, and nothing else does."""

    def loss(model: nn.Module, batch: Any, at: Any) -> torch.Tensor:
        x, y = batch
        if at.step >= 8:
            x = x + torch.from_numpy(np.random.normal(size=x.shape).astype(np.float32))
        return cross_entropy(model, (x, y))

    return Case(mlp(), loss, vectors(), plain=False)


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


@case
def randn_under_a_dispatch_mode() -> Case:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        with Counting():
            x = x + 0.1 * torch.randn(x.shape)
        return cross_entropy(model, (x, y))

    return Case(mlp(), loss, vectors(), plain=False, outcomes=ANY)


@case
def default_generator_named() -> Case:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        noise = torch.empty_like(x).normal_(generator=torch.default_generator)
        return cross_entropy(model, (x + 0.1 * noise, y))

    return Case(mlp(), loss, vectors(), plain=False, outcomes=ANY)


@case
def thread_pool_in_forward() -> Case:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with ThreadPoolExecutor(2) as pool:
                parts = list(
                    pool.map(lambda part: part + 0.1 * torch.randn(part.shape), x.chunk(2))
                )
            return self.net(torch.cat(parts))

    return Case(Pooled(), cross_entropy, vectors(), plain=False, outcomes=ANY)


@case
def mixup_with_numpy() -> Case:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        lam = float(np.random.beta(0.4, 0.4))
        order = torch.randperm(len(x))
        out = model(lam * x + (1 - lam) * x[order])
        f = nn.functional.cross_entropy
        return lam * f(out, y) + (1 - lam) * f(out, y[order])

    return Case(mlp(), loss, vectors(), plain=False)


@case
def seeds_by_hand_in_forward() -> Case:
    class Seeded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch.manual_seed(3)
            return self.net(x + 0.1 * torch.randn(x.shape))

    return Case(Seeded(), cross_entropy, vectors(), plain=False, outcomes=ANY)


@case
def distributions_sampled() -> Case:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        noise = torch.distributions.Laplace(0.0, 0.1).sample(x.shape)
        keep = torch.distributions.Bernoulli(0.9).sample(x.shape)
        return cross_entropy(model, ((x + noise) * keep, y))

    return Case(mlp(), loss, vectors(), plain=False)
