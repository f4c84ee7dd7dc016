"""Closed forms: loss = x * A * B against a simulation in floats; non-finite updates."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support import small
from support.fits import Calls, fit
from support.plain_loop import assert_close
from support.runs import inspected
from torch import nn
from torch.utils.data import TensorDataset

import quorate
from quorate.errors import NotFiniteError


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.b = nn.Parameter(torch.tensor(-0.7, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.a * self.b


def mean_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch[0]).mean()


def weighted_loss(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    """A mean over tokens: row x counts n times."""
    x, n = batch
    return {"loss": (model(x) * n).sum() / n.sum(), "weight": n.sum()}


def sgd(lr: float, **options: Any) -> Any:
    return lambda params: torch.optim.SGD(params, lr=lr, **options)


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


@pytest.mark.parametrize(("workers", "shards"), [(1, 1), (2, 3), (4, 7)])
@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("loss", [mean_loss, weighted_loss])
def test_product_agrees_with_a_hand_simulation(
    workers: int, shards: int, clip: float | None, loss: Any
) -> None:
    rows, batch_size, epochs = 23, 7, 3  # the last batch has 2 rows: fewer than the shards
    x = torch.linspace(-1, 2, rows, dtype=torch.float64)
    n = 1.0 + torch.arange(rows, dtype=torch.float64) % 4
    optimize = quorate.Optimize(sgd(0.1, momentum=0.9), clip_norm=clip)
    trainer = quorate.Trainer(
        Product(), loss, optimizer=optimize, batch_size=batch_size, shards=shards, devices="cpu",
        workers=workers,
    )  # fmt: skip
    losses = [u.loss for u in trainer.updates(TensorDataset(x, n), epochs=epochs, shuffle=False)]
    counts = n if loss is weighted_loss else torch.ones(rows)
    pairs = [(float(v), float(w)) for v, w in zip(x, counts, strict=True)]
    batches = [pairs[i : i + batch_size] for i in range(0, rows, batch_size)] * epochs
    a, b, expected = simulate(batches, 0.1, 0.9, clip)
    assert losses == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert trainer.model.a.item() == pytest.approx(a, rel=1e-12, abs=1e-12)
    assert trainer.model.b.item() == pytest.approx(b, rel=1e-12, abs=1e-12)


def test_the_average_of_the_weights_follows_its_ramp_and_a_schedule_each_update() -> None:
    data = TensorDataset(torch.full((40,), 0.5, dtype=torch.float64))
    optimize = quorate.Optimize(
        sgd(1.0), ema_decay=0.6, schedule=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5)
    )
    trainer = quorate.Trainer(
        Product(), mean_loss, optimizer=optimize, batch_size=4, shards=3, devices="cpu", workers=3
    )
    shadow, rates = trainer.model.a.item(), []
    for n, report in enumerate(trainer.updates(data), start=1):
        rates.append(report.lr)
        decay = min(0.6, (1 + n) / (10 + n))
        shadow -= (1 - decay) * (shadow - trainer.model.a.item())
    assert rates == [0.5**n for n in range(10)]
    averaged = trainer.averaged_model
    assert averaged is not None
    assert averaged.a.item() == pytest.approx(shadow, rel=1e-12)
    plain = trainer.evaluate(data, averaged=False)["loss"]
    assert plain == pytest.approx((0.5 * trainer.model.a * trainer.model.b).item(), rel=1e-12)
    found = trainer.evaluate(data)["loss"]
    assert found == pytest.approx((0.5 * averaged.a * averaged.b).item(), rel=1e-12)
    assert plain != found


def test_evaluation_counts_every_row_once_with_its_weight() -> None:
    rows = 101
    x, n = torch.rand(rows, dtype=torch.float64), torch.arange(1.0, rows + 1, dtype=torch.float64)
    expected = float((x * n).sum() / n.sum() * 1.5 * -0.7)
    for workers, shards, batch_size in [(1, 1, 1000), (4, 4, 7), (3, 8, 50)]:
        trainer = quorate.Trainer(
            Product(), weighted_loss, optimizer=torch.optim.SGD, batch_size=batch_size,
            shards=shards, devices="cpu", workers=workers,
        )  # fmt: skip
        assert trainer.evaluate(TensorDataset(x, n))["loss"] == pytest.approx(expected, rel=1e-12)


# --- values that are not finite -------------------------------------------------------------------


class Poisoned(nn.Module):
    """Has a mask with infinities, the model's own affair."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 4), nn.Linear(4, 1)
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x))


def with_marks(*marks: int) -> TensorDataset:
    x = torch.randn(48, 6, generator=torch.Generator().manual_seed(0))
    mark = torch.zeros(48, 1)
    mark[list(marks)] = 1
    return TensorDataset(x, mark)


def infinite(model: nn.Module, batch: Any) -> torch.Tensor:
    y = model(batch[0])
    spoilt = torch.where(batch[1] == 1, torch.inf, 0.0) * y.abs()
    return y.square().mean() + spoilt.nan_to_num(nan=0.0, posinf=torch.inf).sum()


def root_at_zero(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return a finite loss with a non-finite gradient: the slope of a root at zero."""
    x, mark = batch
    y = model(x)
    return y.square().mean() + (y * 0.0 * (mark == 1) + (mark != 1)).sqrt().sum() * 1e-3


def poisoned_trainer(loss: Any, run_dir: Path, **options: Any) -> quorate.Trainer:
    return small.front_door.trainer(
        Poisoned, loss, optimizer=sgd(0.01, momentum=0.9), ema_decay=0.9, batch_size=8, shards=4,
        schedule=lambda opt: torch.optim.lr_scheduler.ExponentialLR(opt, 0.9), devices="cpu",
        run_dir=run_dir, **options,
    )  # fmt: skip


@pytest.mark.parametrize(("loss", "workers"), [(root_at_zero, 1), (infinite, 2)])
def test_an_update_that_is_not_finite_is_not_made(loss: Any, workers: int, tmp_path: Path) -> None:
    run = poisoned_trainer(loss, tmp_path, workers=workers)
    with pytest.raises(NotFiniteError) as caught:
        run.fit(with_marks(21), epochs=2, shuffle=False)  # step 2, shard 2: rows 20 and 21
    said = str(caught.value)
    of = "the gradient of first.weight, first.bias, last.weight, last.bias"
    assert said.startswith(f"{of} is not finite in step 2: shard 2 (worker ")
    assert "rows 20, 21" in said or "rows [20, 21]" in said
    assert said.count("shard") == 1
    assert run.global_step == inspected(tmp_path)["global_step"] == 2
    assert all(bool(value.isfinite().all()) for value in run.model.parameters())


@pytest.mark.parametrize("update", ["sync", "async"])
def test_skipping_leaves_the_state_and_goes_on(update: str, tmp_path: Path) -> None:
    """Compare with a loop over the same rows, without applying the gradient of the bad step."""
    data = with_marks(9, 30)
    options = {"nonfinite": "skip", "update": update, "workers": 1}
    first = poisoned_trainer(root_at_zero, tmp_path, **options)
    plain = Poisoned()
    plain.load_state_dict(first.model.state_dict())
    first.fit(data, steps=4, shuffle=False)
    again = poisoned_trainer(root_at_zero, tmp_path, **options)  # count and schedule go on
    again.fit(data, epochs=1, shuffle=False)
    optimizer = sgd(0.01, momentum=0.9)(plain.parameters())
    size = 8 if update == "sync" else 2
    for n, start in enumerate(range(0, 48, size)):
        optimizer.param_groups[0]["lr"] = 0.01 * 0.9**n
        optimizer.zero_grad()
        pairs = [data[k : k + 2] for k in range(start, start + size, 2)]
        (sum(root_at_zero(plain, pair) for pair in pairs) / len(pairs)).backward()
        if not any(mark.any() for _, mark in pairs):
            optimizer.step()
    assert_close(again.model, plain, 1e-6)
    assert again.global_step == 48 // size
    log = (tmp_path / "metrics.jsonl").read_text()
    assert '"not_finite": 2' in log


@pytest.mark.parametrize(
    ("losses", "lowest"),
    [
        ([6.5, 5.9, 6.6, 7.4, 8.1], "epoch 2 (5.9000)"),
        ([3.0, 2.0, 1.0, 0.9], None),
        ([1.0, 1.01, 1.02, 1.03], None),
        ([2.0, 1.0, 3.0], None),
    ],
)
def test_a_validation_loss_that_rises_is_said_at_the_end(
    losses: list[float], lowest: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Report a rise from the lowest loss as a trend, but not noise, or one bad evaluation."""
    left = [*losses]
    following = Calls(evaluated=lambda *_: left.pop(0))

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        value = model(batch[0]).mean()
        return value if model.training else 0 * value + left[0]

    data, sizes = TensorDataset(torch.ones(4, 6)), {"batch_size": 4, "shards": 1, "workers": 1}
    fit(None, loss, data, epochs=len(losses), validation=data, callbacks=[following], **sizes)
    said = capsys.readouterr().out
    assert ("the validation loss was lowest at" in said) == (lowest is not None)
    assert f"lowest at {lowest} and is {losses[-1]:.4f} now" in said or lowest is None
