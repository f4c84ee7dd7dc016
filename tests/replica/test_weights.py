"""The mean is derived as it is: what user code does to gradients sees those of a plain loop."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.front_door import trainer
from torch import nn
from torch.utils.data import TensorDataset

ROWS = 9  # of three shards of 3: no power of two
X = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(0))


class Clipped(torch.autograd.Function):
    """Bounds the norm of a gradient on its way."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * (0.05 / (gradient.norm() + 0.05))


def clipped(x: torch.Tensor) -> torch.Tensor:
    return Clipped.apply(x)


def hooked(x: torch.Tensor) -> torch.Tensor:
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return x


def signed(x: torch.Tensor) -> torch.Tensor:
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient + 0.01 * gradient.sign())
    return x


class Net(nn.Module):
    def __init__(self, on_its_way: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 1)
        self.on_its_way = on_its_way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.on_its_way(torch.tanh(self.first(x))))


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch[0]).square().mean()


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("on_its_way", [clipped, hooked, signed])
def test_what_changes_gradients_on_their_way_sees_those_of_the_mean(
    on_its_way: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype, shards: int
) -> None:
    plain = Net(on_its_way).to(dtype)
    model = copy.deepcopy(plain)
    inner = torch.optim.SGD(plain.parameters(), lr=0.5)
    for _ in range(5):
        inner.zero_grad()
        for part in X.to(dtype).chunk(shards):  # as long as each other
            (loss(plain, [part])).backward()
        for parameter in plain.parameters():
            assert parameter.grad is not None
            parameter.grad /= shards
        inner.step()
    run = trainer(
        model,
        loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.5),
        batch_size=ROWS,
        shards=shards,
        devices="cpu",
        workers=2,
    )
    run.fit(TensorDataset(X.to(dtype)), epochs=5, shuffle=False)
    expected = dict(plain.named_parameters())
    for name, parameter in run.model.named_parameters():
        most = 1e-6 if dtype == torch.float32 else 1e-12
        torch.testing.assert_close(parameter, expected[name], rtol=most, atol=most)
