"""Trains models that the script compiles with ``torch.compile``; prints digests.

    quorate run tests/scripts/compiles_itself.py KIND [BACKEND] [DROPOUT]

KIND is which part of the script is compiled: see ``made``.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import quorate
from quorate.replica.digest import digest

KINDS = ("model", "clone", "block", "regional", "function", "loss")


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 16), nn.Linear(16, 8)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.outer(F.gelu(self.inner(x))))


class Net(nn.Module):
    def __init__(self, dropout: float, gate: Any) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList([Block(dropout), Block(dropout)])
        self.gate = gate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.gate(self.first(x))
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def gate(x: torch.Tensor) -> torch.Tensor:
    return F.silu(x) * torch.sigmoid(x) + x.sin()


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    x, labels = batch
    return F.cross_entropy(model(x), labels)


def made(kind: str, backend: str = "aot_eager", dropout: float = 0.2) -> tuple[nn.Module, Any]:
    """Return a model and a loss function, of which something is compiled."""
    torch.manual_seed(0)
    compiled = torch.compile(gate, backend=backend) if kind == "function" else gate
    model: Any = Net(dropout, compiled)
    if kind in ("model", "clone"):
        model = torch.compile(model, backend=backend)  # as nanoGPT has it
    if kind == "clone":
        model = copy.deepcopy(model)
    if kind == "block":
        model.blocks[0] = torch.compile(model.blocks[0], backend=backend)
    if kind == "regional":
        for block in model.blocks:
            block.compile(backend=backend)
    return model, torch.compile(loss, backend=backend) if kind == "loss" else loss


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 3, (32,), generator=generator)
    return TensorDataset(torch.randn(32, 4, generator=generator), labels)


def trainer(model: nn.Module, function: Any, workers: Any = 1, **settings: Any) -> quorate.Trainer:
    return quorate.Trainer(
        model,
        function,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=16,
        shards=4,
        devices="cpu",
        workers=workers,
        **settings,
    )


if __name__ == "__main__":
    model, function = made(sys.argv[1], *sys.argv[2:3], *map(float, sys.argv[3:4]))
    trainer(model, function).fit(data(), epochs=1)
    print("digest", digest(model.state_dict().items()))
