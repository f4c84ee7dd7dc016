"""The closed form: loss = x * A * B with scalars A and B, against a hand simulation in floats."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import quorate


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.b = nn.Parameter(torch.tensor(-0.7, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.a * self.b


def mean_loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return model(batch[0]).mean()


def weighted_loss(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """A mean over tokens: row x counts n times."""
    x, n = batch
    return {"loss": (model(x) * n).sum() / n.sum(), "weight": n.sum()}


def simulate(
    batches: list[list[tuple[float, float]]], lr: float, momentum: float, clip: float | None
) -> tuple[float, float, list[float]]:
    """SGD with momentum on mean(n * x * a * b), by hand. Batches of (x, n)."""
    a, b, va, vb, losses = 1.5, -0.7, 0.0, 0.0, []
    for batch in batches:
        total = math.fsum(n for _, n in batch)
        mean = math.fsum(x * n for x, n in batch) / total
        losses.append(mean * a * b)
        ga, gb = mean * b, mean * a
        if clip is not None and (norm := math.hypot(ga, gb)) > clip:
            ga, gb = ga * clip / (norm + 1e-6), gb * clip / (norm + 1e-6)
        va, vb = momentum * va + ga, momentum * vb + gb
        a, b = a - lr * va, b - lr * vb
    return a, b, losses


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("shards", [1, 3, 5, 7])
@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("weighted", [False, True])
def test_product_agrees_with_a_hand_simulation(
    workers: int, shards: int, clip: float | None, weighted: bool
) -> None:
    rows, batch_size, epochs = 23, 7, 3  # the last batch has 2 rows: fewer than the shards
    x = torch.linspace(-1, 2, rows, dtype=torch.float64)
    n = 1.0 + torch.arange(rows, dtype=torch.float64) % 4
    trainer = quorate.Trainer(
        Product(),
        weighted_loss if weighted else mean_loss,
        optimizer=quorate.Optimize(
            lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), clip_norm=clip
        ),
        batch_size=batch_size,
        shards=shards,
        devices="cpu",
        workers=workers,
    )
    data = TensorDataset(x, n)
    losses = [u.loss for u in trainer.updates(data, epochs=epochs, shuffle=False)]

    pairs = [(float(v), float(w) if weighted else 1.0) for v, w in zip(x, n, strict=True)]
    batches = [pairs[i : i + batch_size] for i in range(0, rows, batch_size)] * epochs
    a, b, expected = simulate(batches, 0.1, 0.9, clip)
    assert losses == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert trainer.model.a.item() == pytest.approx(a, rel=1e-12, abs=1e-12)
    assert trainer.model.b.item() == pytest.approx(b, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("workers", [1, 3])
def test_the_average_of_the_weights_follows_its_ramp(workers: int) -> None:
    x = torch.full((40,), 0.5, dtype=torch.float64)
    trainer = quorate.Trainer(
        Product(),
        mean_loss,
        optimizer=quorate.Optimize(lambda params: torch.optim.SGD(params, lr=0.05), ema_decay=0.6),
        batch_size=4,
        shards=3,
        devices="cpu",
        workers=workers,
    )
    shadow = trainer.model.a.item()
    for n, _ in enumerate(trainer.updates(TensorDataset(x)), start=1):
        decay = min(0.6, (1 + n) / (10 + n))
        shadow -= (1 - decay) * (shadow - trainer.model.a.item())
    assert trainer.averaged_model is not None
    assert trainer.averaged_model.a.item() == pytest.approx(shadow, rel=1e-12)
    plain = trainer.evaluate(TensorDataset(x), averaged=False)["loss"]
    averaged = trainer.evaluate(TensorDataset(x))["loss"]
    model = trainer.averaged_model
    assert plain == pytest.approx((0.5 * trainer.model.a * trainer.model.b).item(), rel=1e-12)
    assert averaged == pytest.approx((0.5 * model.a * model.b).item(), rel=1e-12)
    assert plain != averaged


def test_evaluation_counts_every_row_once_with_its_weight() -> None:
    rows = 101
    x, n = torch.rand(rows, dtype=torch.float64), torch.arange(1.0, rows + 1, dtype=torch.float64)
    for workers, shards, batch_size in [(1, 1, 1000), (2, 3, 10), (4, 4, 7), (3, 8, 50)]:
        trainer = quorate.Trainer(
            Product(),
            weighted_loss,
            optimizer=torch.optim.SGD,
            batch_size=batch_size,
            shards=shards,
            devices="cpu",
            workers=workers,
        )
        expected = float((x * n).sum() / n.sum() * 1.5 * -0.7)
        assert trainer.evaluate(TensorDataset(x, n))["loss"] == pytest.approx(expected, rel=1e-12)


def test_a_schedule_is_stepped_once_per_update() -> None:
    trainer = quorate.Trainer(
        Product(),
        mean_loss,
        optimizer=quorate.Optimize(
            lambda params: torch.optim.SGD(params, lr=1.0),
            schedule=lambda opt: torch.optim.lr_scheduler.ExponentialLR(opt, 0.5),
        ),
        batch_size=4,
        shards=4,
        devices="cpu",
        workers=3,
    )
    rates = [u.lr for u in trainer.updates(TensorDataset(torch.zeros(16, dtype=torch.float64)))]
    assert rates == [1.0, 0.5, 0.25, 0.125]
