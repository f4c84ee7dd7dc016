"""Losses and what they return."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from case import REFUSED, SAID, SAME, Case, case, cross_entropy, mlp, tokens, vectors
from torch import nn


@case
def metrics_beside_the_loss() -> Case:
    def loss(model: nn.Module, batch: Any) -> dict[str, Any]:
        out = model(batch[0])
        right = (out.argmax(1) == batch[1]).float().mean()
        return {"loss": F.cross_entropy(out, batch[1]), "accuracy": right, "one": 1}

    return Case(mlp(), loss, vectors())


@case
def token_weighted() -> Case:
    class LM(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(20, 16), nn.Linear(16, 20)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(x))

    def loss(model: nn.Module, batch: Any) -> dict[str, Any]:
        x = batch[0]
        keep = x[:, 1:] > 5
        out = model(x[:, :-1])
        value = F.cross_entropy(out[keep], x[:, 1:][keep])
        return {"loss": value, "weight": int(keep.sum())}

    return Case(LM(), loss, tokens(), plain=False)


@case
def contrastive_within_the_shard() -> Case:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        z = F.normalize(model(batch[0]), dim=1)
        scores = z @ z.T / 0.2 - 1e9 * torch.eye(len(z))
        return F.cross_entropy(scores, (torch.arange(len(z)) + 1) % len(z))

    return Case(mlp(), loss, vectors())


@case
def ctc() -> Case:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        out = model(batch[0]).reshape(-1, 4, 1, 5).permute(1, 0, 2, 3)[:, :, 0].log_softmax(-1)
        rows = out.shape[1]
        targets = torch.randint(1, 5, (rows, 2), generator=torch.Generator().manual_seed(0))
        lengths = torch.full((rows,), 4), torch.full((rows,), 2)
        return F.ctc_loss(out, targets, *lengths)

    return Case(nn.Linear(8, 20), loss, vectors(), partial(torch.optim.SGD, lr=0.01))


@case
def embedding_gradients_scatter() -> Case:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.EmbeddingBag(20, 16, mode="max")
            self.head = nn.Linear(16, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(x))

    return Case(Bag(), cross_entropy, tokens())


@case
def sum_and_not_mean() -> Case:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum") / 100

    return Case(mlp(), loss, vectors())


@case
def prints_and_logs() -> Case:
    import logging

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        value = cross_entropy(model, batch)
        logging.getLogger("stranger").warning("loss %.3f", float(value))
        return value

    return Case(mlp(), loss, vectors())


@case
def autocast_inside() -> Case:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(batch[0])
        return F.cross_entropy(out.float(), batch[1])

    return Case(mlp(), loss, vectors())


@case
def quantisation_aware() -> Case:
    """Fake quantisation with observers that keep minima and maxima in buffers."""
    import warnings

    from torch.ao import quantization

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
        model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
        quantization.prepare_qat(model.train(), inplace=True)
    return Case(model, cross_entropy, vectors(), plain=False, outcomes=(SAME, SAID, REFUSED))


@case
def growing_input_shapes() -> Case:
    rows = [(torch.full((1 + n % 3, 8), n / 96.0), n % 3) for n in range(96)]

    def pooled(samples: list[Any]) -> Any:
        x = torch.stack([s[0].mean(0) for s in samples])
        return x, torch.tensor([s[1] for s in samples])

    import quorate

    settings = {"loading": quorate.Loading(collate=pooled)}
    return Case(mlp(), cross_entropy, rows, plain=False, settings=settings)
