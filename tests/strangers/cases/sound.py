"""Sound models and losses: the same bits everywhere, and nobody is warned."""

from typing import Any

import torch
from case import Case, case, cross_entropy, mlp
from torch import nn


@case
def plain_mlp() -> Case:
    return Case()


# --- parts compiled by the script -----------------------------------------------------------------


def compiled(part: Any) -> Any:
    return torch.compile(part, backend="aot_eager")


case(lambda: Case(model=compiled(mlp())), "compiled_model")
case(lambda: Case(loss=compiled(cross_entropy)), "compiled_loss")


@case
def compiled_layers() -> Case:
    """``copy.deepcopy`` leaves out the effect of ``module.compile()``; dropout draws as ever."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 3))
    for layer in model:
        layer.compile(backend="aot_eager")
    return Case(model=model, plain=False)
