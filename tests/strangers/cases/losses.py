"""Losses, what they return, and what they do to their batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from case import Net, loss, tokens, vectors
from torch import Tensor, nn


def words() -> nn.Module:
    return nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 20))


@loss(model=words, data=tokens, plain=False)
def token_weighted(model: nn.Module, batch: Any) -> dict[str, Any]:
    x = batch[0]
    keep = x[:, 1:] > 5
    value = F.cross_entropy(model(x[:, :-1])[keep], x[:, 1:][keep])
    return {"loss": value, "weight": int(keep.sum())}


@loss()
def autocast_inside(model: nn.Module, batch: Any) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(batch[0])
    return F.cross_entropy(out.float(), batch[1])


def rows_by_name() -> list[Any]:
    return [{"x": x, "labels": y} for x, y in vectors()]


@loss(model=Net, data=rows_by_name)
def dict_batches(model: nn.Module, batch: Any) -> Tensor:
    """Takes its batch apart."""
    labels = batch.pop("labels")
    return F.cross_entropy(model(**batch), labels)


@loss()
def masking_in_place(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    assert (x[:, 0] != 0).all(), "as of a batch that was computed from before"
    x[:, ::3] = 0
    return F.cross_entropy(model(x), y)
