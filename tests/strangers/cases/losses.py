"""Losses: their results, and their effects on the batch."""

from typing import Any

import torch
import torch.nn.functional as F
from case import Net, loss, vectors
from torch import Tensor, nn


@loss()
def autocast_inside(model: nn.Module, batch: Any) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(batch[0])
    return F.cross_entropy(out.float(), batch[1])


def rows_by_name() -> list[Any]:
    return [{"x": x, "labels": y} for x, y in vectors()]


@loss(model=Net, data=rows_by_name)
def dict_batches(model: nn.Module, batch: Any) -> Tensor:
    """Take the batch apart."""
    labels = batch.pop("labels")
    return F.cross_entropy(model(**batch), labels)
