"""Layers of more than one slice each, whose gradients ranks send while backward makes the next.

    quorate run --engine collective --workers 2 tests/scripts/peculiar.py doubled

One layer is frozen, one not used, and others are used twice. doubled: a gradient changes after it
was made. checkpoints: backward passes within the backward pass. teacher: forward moves frozen
weights, and a buffer comes late.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import quorate

HOW = sys.argv[1]


class Doubled(torch.autograd.Function):
    """The same value; doubles the gradient that another parameter has by then."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        context.weight = weight
        return value.clone()

    @staticmethod
    def backward(context: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        if context.weight.grad is not None:
            context.weight.grad.mul_(2)
        return grad, None


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 300)
        self.layers = nn.ModuleList(nn.Linear(300, 300) for _ in range(3))
        self.frozen = nn.Linear(300, 300).requires_grad_(False)
        self.unused = nn.Linear(300, 300)
        self.register_buffer("scale", None, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.first(x).relu()
        if HOW == "doubled":
            inner = Doubled.apply(inner, self.layers[2].weight)
        elif HOW == "teacher":
            self.frozen.weight.data.mul_(0.9).add_(self.layers[0].weight.data, alpha=0.1)
            if self.scale is None:
                self.scale = torch.full((300,), 0.5)
            inner = inner * self.scale
        for layer in self.layers:
            for reentrant in (True, False):
                inner = self.called(layer, inner, reentrant=reentrant)
        return self.frozen(inner)

    def called(self, layer: nn.Module, x: torch.Tensor, *, reentrant: bool) -> Any:
        if HOW != "checkpoints":
            return layer(x).relu()
        return checkpoint(layer, x, use_reentrant=reentrant)


if __name__ == "__main__":
    torch.manual_seed(0)
    trainer = quorate.Trainer(
        Deep,
        lambda model, batch: model(batch).square().mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        batch_size=12,
        shards=4,
    )
    trainer.fit(torch.randn(48, 4, generator=torch.Generator().manual_seed(0)), epochs=1)
