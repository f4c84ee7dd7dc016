"""What a replica computes: against plain torch, shard by shard."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.messages import expect_error
from torch import nn
from torch.utils.data import TensorDataset

import quorate
from quorate.errors import SettingError
from quorate.machine.devices import Group
from quorate.replica.computing import Computing
from quorate.replica.digest import digest
from quorate.replica.notes import Notes
from quorate.replica.replica import Replica
from quorate.replica.streams import Stream
from quorate.replica.turns import Turns
from quorate.training import loop
from quorate.training.state import State

CPU = Group([torch.device("cpu")])


def mean_square(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch[0]).square().mean()


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def state_of(model: nn.Module) -> State:
    return State(model, CPU[0], shared=False, optimize=quorate.Optimize(sgd))


class Odd(nn.Module):
    """Shared and frozen parameters, a sparse gradient, buffers of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 6, sparse=True)
        self.norm = nn.BatchNorm1d(6)
        self.linear = nn.Linear(6, 6)
        self.again = nn.Linear(6, 6)
        self.again.weight = self.linear.weight
        self.frozen = nn.Linear(6, 2).requires_grad_(False)
        self.register_buffer("table", torch.rand(5) / 3)
        self.register_buffer("hidden", torch.rand(2, dtype=torch.float64), persistent=False)
        self.register_buffer("count", torch.tensor([3, 4]))
        self.register_buffer("flag", torch.tensor(True))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embedding(tokens).sum(1))
        return self.frozen(self.again(torch.tanh(self.linear(x))))


TOKENS = torch.randint(0, 20, (12, 3), generator=torch.Generator().manual_seed(0))


def test_the_gradient_is_that_of_plain_torch_times_the_weight() -> None:
    torch.manual_seed(0)
    plain = Odd()
    model = copy.deepcopy(plain)
    state = state_of(model)
    replica = Replica(
        model,
        state.parameters,
        CPU,
        loss=mean_square,
        turns=Turns(),
        computing=Computing(),
        notes=Notes(),
    )
    with Stream() as stream:
        result = replica.gradient([TOKENS], 12, stream, seed=1)
    loss = mean_square(plain, [TOKENS])
    loss.backward()
    assert result.weight == 12
    assert result.means() == {"loss": pytest.approx(loss.item(), rel=1e-6)}
    assert result.gradient is not None
    for name, parameter in plain.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None
            expected = 12 * parameter.grad.to_dense()
            torch.testing.assert_close(result.gradient.views[name], expected)
    assert result.missing == frozenset()


@pytest.mark.parametrize("workers", [1, 3])
def test_buffers_are_weighted_means_over_shards(workers: int) -> None:
    torch.manual_seed(0)
    model = Odd()
    before = copy.deepcopy(model.state_dict())
    hidden = model.hidden.clone()
    trainer = quorate.Trainer(
        model,
        mean_square,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.0),
        batch_size=12,
        shards=5,
        devices="cpu",
        workers=workers,
    )
    for _ in trainer.updates(TensorDataset(TOKENS), shuffle=False):
        pass
    bounds = [(s * 12 // 5, (s + 1) * 12 // 5) for s in range(5)]
    seen = [model.embedding(TOKENS[a:b]).sum(1).detach() for a, b in bounds]
    mean = sum(len(x) * (0.1 * x.mean(0)) for x in seen) / 12
    torch.testing.assert_close(model.norm.running_mean, mean)
    variance = sum(len(x) * (0.9 + 0.1 * x.var(0)) for x in seen) / 12
    torch.testing.assert_close(model.norm.running_var, variance)
    assert model.norm.num_batches_tracked == 1
    for name in ("table", "count", "flag", "frozen.weight"):
        assert torch.equal(model.state_dict()[name], before[name]), name
    assert torch.equal(model.hidden, hidden)
    assert model.again.weight is model.linear.weight


def test_memory_is_logarithmic_in_the_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """One replica holds at most log2(V) + 2 gradients at a time, however many its shards are.

    Of shards that are dealt in runs it holds those of one run too.
    """
    monkeypatch.setattr(loop, "RUN_S", 0.0)
    replicas: list[Replica] = []

    def watched(*arguments: Any, **options: Any) -> Replica:
        replicas.append(Replica(*arguments, **options))
        return replicas[-1]

    monkeypatch.setattr("quorate.transports.stages.made.Replica", watched)
    trainer = quorate.Trainer(
        lambda: nn.Linear(4, 4),
        mean_square,
        optimizer=sgd,
        batch_size=128,
        shards=128,
        devices="cpu",
        workers=1,
    )
    for _ in trainer.updates(TensorDataset(torch.ones(256, 4))):
        pass
    assert 2 <= len(replicas[-1]._free) + 1 <= 7 + 2


class Views(nn.Module):
    """Flattens with a view, which a channels_last tensor does not allow."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 4, 3, padding=1)
        self.linear = nn.Linear(4 * 36, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.convolution(images))
        return self.linear(x.view(len(x), -1))


def test_a_model_that_channels_last_breaks_is_trained_without_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    images = torch.rand(8, 1, 6, 6)
    trainer = quorate.Trainer(
        Views, mean_square, optimizer=sgd, batch_size=4, shards=2, devices="cpu", workers=2
    )
    for _ in trainer.updates(TensorDataset(images)):
        pass
    assert "channels_last is off" in caplog.text
    assert trainer.model.convolution.weight.is_contiguous()


def test_parameters_without_a_gradient_are_left_alone_and_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = nn.Linear(4, 1)
            self.unused = nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    trainer = quorate.Trainer(
        Unused, mean_square, optimizer=sgd, batch_size=4, shards=2, devices="cpu", workers=2
    )
    before = trainer.model.unused.weight.clone()
    for _ in trainer.updates(TensorDataset(torch.rand(16, 4))):
        pass
    assert torch.equal(before, trainer.model.unused.weight)
    said = [r.message for r in caplog.records if "no gradient" in r.message]
    assert said == ["no gradient in step 0, so unchanged: unused.bias, unused.weight"]


def test_a_shard_of_weight_zero_adds_nothing_even_if_its_loss_is_not_a_number() -> None:
    def loss(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        x, real = batch
        return {"loss": (model(x)[:, 0] * real).sum() / real.sum(), "weight": real.sum()}

    x, real = torch.rand(8, 4), torch.tensor([0.0, 0, 0, 0, 1, 1, 1, 1])
    digests = set()
    for rows, shards in ((8, 2), (4, 1)):
        torch.manual_seed(0)
        trainer = quorate.Trainer(
            nn.Linear(4, 1), loss, optimizer=sgd, batch_size=rows, shards=shards, devices="cpu"
        )
        data = TensorDataset(x[-rows:], real[-rows:])
        for report in trainer.updates(data, shuffle=False):
            assert report.weight == 4
        digests.add(digest(trainer.model.state_dict().items()))
    assert len(digests) == 1


def test_metrics_with_other_names_in_another_shard_are_an_error() -> None:
    def loss(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        name = "small" if batch[0].max() < 4 else "large"
        return {"loss": model(batch[0]).mean(), name: batch[0].mean()}

    trainer = quorate.Trainer(
        lambda: nn.Linear(1, 1), loss, optimizer=sgd, batch_size=8, shards=2, devices="cpu"
    )
    data = TensorDataset(torch.arange(8.0).reshape(8, 1))
    with expect_error(quorate.UserError, name="metrics"):
        list(trainer.updates(data, shuffle=False))


class Locked(nn.Linear):
    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("no copies")


@pytest.mark.parametrize(
    "model",
    [
        lambda: Locked(4, 1),
        lambda: nn.LazyLinear(1),
        lambda: nn.ReLU(),
        lambda: 5,
        5,
    ],
)
def test_a_model_that_cannot_be_trained_is_refused(model: Any) -> None:
    def train() -> None:
        trainer = quorate.Trainer(model, mean_square, optimizer=sgd, batch_size=4, devices="cpu")
        list(trainer.updates(TensorDataset(torch.rand(4, 4))))

    with expect_error(SettingError):
        train()


def test_batches_of_dicts_and_outputs_that_are_dicts() -> None:
    class Dicts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 1)

        def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.linear(inputs)
            return {"loss": F.mse_loss(logits, labels), "logits": logits}

    rows = [{"inputs": torch.rand(3), "labels": torch.rand(1)} for _ in range(10)]
    trainer = quorate.Trainer(
        Dicts,
        lambda model, batch: model(**batch)["loss"],
        optimizer=sgd,
        batch_size=4,
        shards=2,
        devices="cpu",
        workers=2,
    )
    assert len(list(trainer.updates(rows, epochs=2))) == 6
    assert set(trainer.evaluate(rows)) == {"loss"}


def test_parts_in_evaluation_mode_stay_so_and_modes_do_not_leak_between_shards() -> None:
    seen: list[tuple[bool, bool]] = []

    def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        seen.append((model.training, model[1].training))
        value = model(batch[0]).square().mean()
        model.eval()  # and forgets to undo it
        return value

    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[1].eval()
    trainer = quorate.Trainer(
        model, loss, optimizer=sgd, batch_size=8, shards=4, devices="cpu", workers=2
    )
    data = TensorDataset(torch.rand(16, 4))
    list(trainer.updates(data))
    assert set(seen) == {(True, False)}
    assert torch.equal(model[1].running_mean, torch.zeros(4))
    seen.clear()
    trainer.evaluate(data)
    assert set(seen) == {(False, False)}


class Once(torch.autograd.Function):
    """Raises in the first backward after it was armed, when later layers have their gradients."""

    armed = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        if Once.armed:
            Once.armed = False
            raise RuntimeError("a passing fault")
        return gradient


def test_a_shard_that_failed_once_in_backward_leaves_no_trace() -> None:
    class Faulty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(Once.apply(self.first(x)))

    def run(fault_at: int) -> str:
        trainer = quorate.Trainer(
            Faulty, mean_square, optimizer=sgd, batch_size=8, shards=4, devices="cpu", workers=2
        )
        data = torch.rand(32, 4, generator=torch.Generator().manual_seed(0))
        for report in trainer.updates(TensorDataset(data), epochs=2):
            Once.armed = report.global_step == fault_at
        assert not Once.armed
        return digest(trainer.model.state_dict().items())

    assert run(fault_at=3) == run(fault_at=-1)


@pytest.mark.parametrize(("dtype", "weight"), [(torch.bfloat16, 257), (torch.float16, 70_000)])
def test_a_weight_that_the_dtype_of_the_loss_cannot_hold_is_kept(
    dtype: torch.dtype, weight: int
) -> None:
    """257 is 256 in bfloat16, and 70,000 infinite in float16."""

    def loss(model: nn.Module, batch: Any) -> dict[str, Any]:
        return {"loss": model.weight.sum().to(dtype), "weight": weight}

    model = nn.Linear(1, 1, bias=False)
    before = model.weight.item()
    trainer = quorate.Trainer(
        model, loss, optimizer=sgd, batch_size=4, shards=2, devices="cpu", workers=2
    )
    list(trainer.updates(TensorDataset(torch.rand(4, 1))))
    assert model.weight.item() == pytest.approx(before - 0.1, abs=1e-7)


def test_hooks_on_parameters_are_refused() -> None:
    model = nn.Linear(4, 1)
    model.weight.register_hook(lambda gradient: gradient * 0)
    with expect_error(SettingError, name="model", got="a hook on weight"):
        quorate.Trainer(model, mean_square, optimizer=sgd, batch_size=4, devices="cpu")
