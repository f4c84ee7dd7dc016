"""Models and losses that are as they should be: the same bits everywhere, and nobody is warned."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from case import Case, case, cross_entropy, doubles, mlp, module
from torch import Tensor, nn

ADAM = partial(torch.optim.Adam, lr=1e-2)


@case
def plain_mlp() -> Case:
    return Case()


@module("checkpointed", plain=False)
class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Tanh()) for _ in range(3)
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


@case
def double_precision() -> Case:
    return Case(model=mlp().double(), data=doubles(), optimizer=ADAM)


# --- what the script compiles ---------------------------------------------------------------------


def compiled(part: Any) -> Any:
    return torch.compile(part, backend="aot_eager")


case(lambda: Case(model=compiled(mlp())), "compiled_model")
case(lambda: Case(loss=compiled(cross_entropy)), "compiled_loss")


@case
def compiled_layers() -> Case:
    """``copy.deepcopy`` leaves out what ``module.compile()`` did; dropout draws as ever."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 3))
    for layer in model:
        layer.compile(backend="aot_eager")
    return Case(model=model, plain=False)
