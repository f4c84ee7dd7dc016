"""What becomes of the buffers that shards change: averages, counters, tables, queues."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from support.front_door import trainer
from support.messages import expect_error
from torch import nn
from torch.utils.data import TensorDataset

import quorate
from quorate.replica.digest import digest

ROWS, EXPERTS = 13, 5  # of 4 shards: 3, 3, 3 and 4 rows
STEPS = 6
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(ROWS * STEPS, 3, generator=GENERATOR)
ROUTE = torch.randint(0, EXPERTS, (ROWS * STEPS,), generator=GENERATOR)
DATA = TensorDataset(X, ROUTE)


class Counts(nn.Module):
    """Counters of rows, of experts, of calls and of draws; tables; a mask; an average."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.branch = nn.BatchNorm1d(3)  # that few shards go through
        table = torch.rand(7, dtype=torch.float64) / 3
        self.register_buffer("table", table)
        self.register_buffer("waves", torch.polar(torch.rand(5) / 3, torch.rand(5)))
        self.register_buffer("mask", torch.zeros(2, 2).fill_(float("-inf")).triu(1))
        self.register_buffer("narrow", torch.rand(3).bfloat16())
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("tokens", torch.tensor(0))
        self.register_buffer("usage", torch.zeros(EXPERTS, dtype=torch.int64))
        self.register_buffer("calls", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("draws", torch.tensor([7, 0]))  # a seed, and how often it was used
        self.register_buffer("pointer", torch.tensor(90))
        self.register_buffer("wave_mean", torch.zeros(3, dtype=torch.complex64))

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


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(*batch).square().mean()


def trained(workers: int, **settings: Any) -> nn.Module:
    run = trainer(
        Counts(),
        loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.0),
        batch_size=ROWS,
        shards=4,
        devices="cpu",
        workers=workers,
        engine="towers",
        **settings,
    )
    run.fit(DATA, epochs=1, shuffle=False)
    return run.model


def test_counters_add_up_averages_are_means_and_the_rest_stays() -> None:
    before, model = Counts(), trained(1)
    for name in ("table", "waves", "mask", "narrow", "flags"):
        assert torch.equal(getattr(before, name), getattr(model, name)), name
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


def test_the_bits_are_the_same_on_more_towers() -> None:
    digests = {digest(trained(workers).state_dict().items()) for workers in (1, 2, 3, 4)}
    assert len(digests) == 1


@pytest.mark.parametrize("rule", ["async", "bounded:2"])
def test_nothing_is_lost_where_each_shard_is_an_update(rule: str) -> None:
    model = trained(3, update=rule)
    assert model.tokens == X.numel()
    assert torch.equal(model.usage, torch.bincount(ROUTE, minlength=EXPERTS))


class Queue(nn.Module):
    """Keys of the last rows, in the manner of MoCo."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 3)
        self.register_buffer("queue", torch.randn(3, 8))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))
        self.register_buffer("table", torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keys = self.layer(x)
        with torch.no_grad():
            pointer = int(self.queue_ptr)
            self.queue[:, pointer : pointer + len(keys)] = keys.T
            self.queue_ptr[0] = (pointer + len(keys)) % 8
        return keys


@pytest.mark.parametrize("shards", [1, 2])
def test_a_queue_that_becomes_a_mean_is_named(
    shards: int, caplog: pytest.LogCaptureFixture
) -> None:
    run = trainer(
        Queue(),
        lambda model, batch: model(batch[0]).square().mean(),
        optimizer=torch.optim.SGD,
        batch_size=4,
        shards=shards,
        devices="cpu",
        workers=1,
    )
    for n, _ in enumerate(run.updates(TensorDataset(X[:40])), start=1):
        assert run.model.queue_ptr == n * 4 // shards % 8
    said = [r.message for r in caplog.records if "queue" in r.message]
    assert len(said) == (shards > 1)
    assert not [r for r in caplog.records if "'table'" in r.message]


class Grows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = torch.cat([self.seen, x.detach().mean()[None]])
        return self.layer(x)


def test_a_buffer_that_grows_is_refused_by_name() -> None:
    run = trainer(
        Grows(),
        lambda model, batch: model(batch[0]).square().mean(),
        optimizer=torch.optim.SGD,
        batch_size=4,
        shards=2,
        devices="cpu",
        workers=1,
    )
    with expect_error(
        quorate.UserError, name="buffer 'seen'", got="shape (1,) after a forward pass"
    ):
        run.fit(TensorDataset(X), steps=5)


def test_an_unchanged_model_keeps_every_bit_of_every_buffer() -> None:
    before = copy.deepcopy(Counts().eval())
    model = Counts().eval()
    run = trainer(
        model,
        loss,
        optimizer=torch.optim.SGD,
        batch_size=ROWS,
        shards=3,
        devices="cpu",
        workers=1,
    )
    run.evaluate(DATA)
    for name, value in before.named_buffers():
        assert torch.equal(value, dict(run.model.named_buffers())[name]), name


def test_a_sync_batch_norm_is_said_to_be_one_of_each_shard(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(
        nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    )
    run = trainer(
        model,
        lambda model, batch: model[0](batch[0]).square().mean(),
        optimizer=torch.optim.SGD,
        batch_size=4,
        shards=2,
        devices="cpu",
        workers=1,
    )
    for _ in run.updates(TensorDataset(X[:8])):
        pass
    assert caplog.text.count("SyncBatchNorm normalises over each shard") == 1


class Decays(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen * 0.9 + len(x)
        return self.layer(x)


def test_a_buffer_that_gets_another_dtype_is_refused_by_name() -> None:
    run = trainer(
        Decays(),
        lambda model, batch: model(batch[0]).square().mean(),
        optimizer=torch.optim.SGD,
        batch_size=4,
        shards=2,
        devices="cpu",
        workers=1,
    )
    with expect_error(
        quorate.UserError, name="buffer 'seen'", expected="dtype torch.int64 as before"
    ):
        run.fit(DATA, steps=1)


class WritesAlways(nn.Module):
    """Writes buffers in training and in evaluation alike; ``grown`` in evaluation alone."""

    def __init__(self, *, grows: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
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


def writer(*, grows: bool) -> quorate.Trainer:
    return trainer(
        WritesAlways(grows=grows),
        lambda model, batch: model(batch[0]).square().mean(),
        optimizer=torch.optim.SGD,
        batch_size=4,
        shards=2,
        devices="cpu",
        workers=2,
        engine="towers",
    )


def test_what_an_evaluation_writes_to_buffers_is_dropped_and_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = writer(grows=False)
    run.fit(TensorDataset(X[:8]), epochs=1)
    trained = copy.deepcopy(dict(run.model.named_buffers()))
    assert trained["calls"] == 2
    assert "in evaluation too" not in caplog.text
    run.evaluate(TensorDataset(X))
    for name, buffer in run.model.named_buffers():
        assert torch.equal(buffer, trained[name]), name
    for name in ("calls", "mean", "flags"):
        assert caplog.text.count(f"forward writes the buffer {name!r} in evaluation too") == 1
    assert caplog.text.count("in evaluation too") == 3


def test_a_buffer_that_grows_in_evaluation_is_refused_by_name() -> None:
    with pytest.raises(quorate.UserError, match="grown"):
        writer(grows=True).evaluate(TensorDataset(X))
