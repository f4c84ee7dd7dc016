"""The fates of buffers changed by shards: averages, counters, tables, queues.

And train() and eval() as in a plain loop: a model's own, and parts put aside by the script.
"""

import copy
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from support.digests import digest_of
from support.fits import Calls, fit
from torch import nn
from torch.utils.data import TensorDataset

import quorate

ROWS, EXPERTS = 13, 5  # of 4 shards: 3, 3, 3 and 4 rows
STEPS = 6
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(ROWS * STEPS, 3, generator=GENERATOR)
ROUTE = torch.randint(0, EXPERTS, (ROWS * STEPS,), generator=GENERATOR)
DATA = TensorDataset(X, ROUTE)
CONSTANT = ("table", "waves", "mask", "narrow", "flags", "head.offset")


class Counts(nn.Module):
    """Counters of rows, of experts, of calls and of draws; tables; a mask; an average."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.branch = nn.BatchNorm1d(3)  # for few shards
        table = torch.rand(7, dtype=torch.float64) / 3
        self.register_buffer("table", table, persistent=False)
        self.register_buffer("waves", torch.polar(torch.rand(5) / 3, torch.rand(5)))
        self.register_buffer("mask", torch.zeros(2, 2).fill_(float("-inf")).triu(1))
        self.register_buffer("narrow", torch.rand(3).bfloat16())
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("tokens", torch.tensor(0))
        self.register_buffer("usage", torch.zeros(EXPERTS, dtype=torch.int64))
        self.register_buffer("calls", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("draws", torch.tensor([7, 0]))  # a seed, and the number of its uses
        self.register_buffer("pointer", torch.tensor(90))
        self.register_buffer("wave_mean", torch.zeros(3, dtype=torch.complex64))
        self.head = nn.Module()
        self.head.register_buffer("offset", torch.ones(2))  # the last of all

    def forward(self, x: torch.Tensor, route: torch.Tensor) -> torch.Tensor:
        out = self.norm(self.layer(x))
        if self.training:
            with torch.no_grad():
                self.tokens += x.numel()
                self.usage += torch.bincount(route, minlength=EXPERTS)
                self.calls += 1
                self.draws = self.draws + torch.tensor([0, 1])
                self.pointer.fill_((int(self.pointer) - len(x)) % 100)
                self.wave_mean.lerp_(torch.complex(x, 2 * x).mean(0), 0.1)
        if bool(route[0] == 0):
            out = out + self.branch(x)
        return out


BEFORE = {name: buffer.tolist() for name, buffer in Counts().named_buffers()}


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    for name in CONSTANT:
        assert model.get_buffer(name).tolist() == BEFORE[name], name
    return model(*batch).square().mean()


def trained(workers: int, **settings: Any) -> quorate.Trainer:
    still = partial(torch.optim.SGD, lr=0.0)
    shape: dict[str, Any] = {"batch_size": ROWS, "epochs": 1, "shuffle": False, "engine": "towers"}
    return fit(Counts, loss, DATA, workers=workers, optimizer=still, **shape, **settings)


@pytest.mark.parametrize("workers", [1, 3])
def test_counters_add_up_averages_are_means_and_the_rest_stays(workers: int) -> None:
    trainer = trained(workers)
    model: Any = trainer.model
    for name in CONSTANT:
        assert model.get_buffer(name).tolist() == BEFORE[name], name
    assert model.tokens == X.numel()
    assert torch.equal(model.usage, torch.bincount(ROUTE, minlength=EXPERTS))
    assert model.calls.tolist() == [STEPS]
    assert model.draws.tolist() == [7, STEPS]
    assert model.norm.num_batches_tracked == STEPS
    assert model.pointer == (90 - 3 * STEPS) % 100  # lowered: the first shard's, of 3 rows
    bounds = [s * ROWS // 4 for s in range(5)]
    mean = torch.zeros(3, dtype=torch.complex128)
    branch, branches = torch.zeros(3, dtype=torch.float64), 0
    for step in range(STEPS):
        shards = [slice(step * ROWS + a, step * ROWS + b) for a, b in pairwise(bounds)]
        parts = [X[s].double() for s in shards]
        waves = sum(len(x) * torch.complex(x, 2 * x).mean(0) for x in parts) / ROWS
        mean = 0.9 * mean + 0.1 * waves
        through = [x for x, s in zip(parts, shards, strict=True) if ROUTE[s][0] == 0]
        if through:
            branches += 1
            rows = sum(len(x) for x in through)
            branch = sum(len(x) * (0.9 * branch + 0.1 * x.mean(0)) for x in through) / rows
    torch.testing.assert_close(model.wave_mean, mean.to(torch.complex64))
    torch.testing.assert_close(model.branch.running_mean, branch.float())
    assert 0 < branches < STEPS
    assert model.branch.num_batches_tracked == branches
    assert digest_of(trainer) == digest_of(trained(2))


@pytest.mark.parametrize("rule", ["async", "bounded:2"])
def test_nothing_is_lost_where_each_shard_is_an_update(rule: str) -> None:
    model: Any = trained(3, update=rule).model
    assert model.tokens == X.numel()
    assert torch.equal(model.usage, torch.bincount(ROUTE, minlength=EXPERTS))


def of_rows(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch[0]).square().mean()


class WritesAlways(nn.Module):
    """Writes buffers in training and in evaluation alike; ``grown`` in evaluation alone."""

    def __init__(self, *, grows: bool) -> None:
        super().__init__()
        self.layer, self.grows = nn.Linear(3, 3), grows
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("angles", torch.arange(3.0))
        self.register_buffer("grown", torch.zeros(2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.mean.lerp_(x.detach().mean(0), 0.5)
        self.flags = ~self.flags
        self.angles.copy_(torch.arange(3.0))  # computed anew each time, with the same values
        if self.grows and not self.training:
            self.grown = torch.cat([self.grown, x.detach()])
        return self.layer(x)


def test_what_an_evaluation_writes_to_buffers_is_dropped_and_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run, growing = (
        fit(WritesAlways(grows=grows), of_rows, TensorDataset(X[:24]), epochs=1, workers=2)
        for grows in (False, True)
    )
    trained = copy.deepcopy(dict(run.model.named_buffers()))
    assert trained["calls"] == 2
    assert "in evaluation too" not in caplog.text
    run.evaluate(TensorDataset(X))
    for name, buffer in run.model.named_buffers():
        assert torch.equal(buffer, trained[name]), name
    for name in ("calls", "mean", "flags"):
        assert caplog.text.count(f"forward writes the buffer {name!r} in evaluation too") == 1
    assert caplog.text.count("in evaluation too") == 3
    with pytest.raises(quorate.UserError, match="grown"):
        growing.evaluate(TensorDataset(X))


# --- modes ----------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.head = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(x))


class SaysItsMode(Net):
    """Notes more than the flags of modules in a train() of its own."""

    def train(self, mode: bool = True) -> "SaysItsMode":
        self.mode = float(mode)
        super().train(mode)
        return self


def test_evaluations_call_a_train_of_the_models_own_too() -> None:
    def loss(model: Any, batch: Any) -> dict[str, torch.Tensor]:
        return {"loss": of_rows(model, batch), "mode": torch.tensor(model.mode)}

    modes: list[float] = []

    note = Calls(
        updated=lambda _, report: modes.append(report.metrics["mode"]),
        evaluated=lambda _, metrics: modes.append(metrics["mode"]),
    )
    data = TensorDataset(X[:12])
    more: Any = {"validation": data, "batch_size": 12, "callbacks": [note]}
    fit(SaysItsMode(), loss, data, epochs=2, workers=1, **more)
    assert modes == [1.0, 0.0] * 2


class KeepsNorms(Net):
    """Keeps the backbone's statistics and freezes its first layer, as detectors do."""

    def train(self, mode: bool = True) -> "KeepsNorms":
        super().train(mode)
        self.backbone[1].eval()
        self.backbone[0].requires_grad_(False)
        return self


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("loaded", ["train", "eval"])
def test_a_train_of_the_models_own_is_called(loaded: str, workers: int) -> None:
    model = KeepsNorms()
    before = model.backbone[0].weight.clone()
    nn.Module.train(model, loaded == "train")
    fit(model, of_rows, TensorDataset(X[:24]), epochs=2, workers=workers, engine="towers")
    assert model.backbone[1].num_batches_tracked == 0
    assert torch.equal(model.backbone[1].running_mean, torch.zeros(3))
    assert torch.equal(model.backbone[0].weight, before)
    assert model.head[1].num_batches_tracked == 4
