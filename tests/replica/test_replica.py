"""A replica's work: weights, metrics and failures of shards, and refusals."""

import gc
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.digests import digest_of
from support.fits import Calls, fit, sgd
from support.messages import expect_error
from torch import nn
from torch.utils.data import TensorDataset

import quorate
from quorate.errors import SettingError


def mean_square(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch[0]).square().mean()


def large_tensors() -> int:
    tensors = [t for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter)]
    return len({t.untyped_storage().data_ptr() for t in tensors if t.numel() >= 4000})


def test_memory_is_logarithmic_in_the_shards() -> None:
    """A tower has log2(V) + 2 gradients at a time, plus those of shards dealt at once."""
    shards, found = 128, []

    def loss(model: nn.Module, batch: Any, at: Any) -> torch.Tensor:
        if at.training and at.step == 1 and at.rows[0] in (shards - 2, 2 * shards - 1):
            found.append(large_tensors() - before)
        return mean_square(model, batch)

    before = large_tensors()  # tensors of other tests
    data = TensorDataset(torch.ones(2 * shards, 4))
    shape = {"batch_size": shards, "shards": shards, "epochs": 1, "shuffle": False}
    fit(partial(nn.Linear, 4, 1000), loss, data, workers=1, engine="towers", **shape)
    assert len(found) == 1
    assert found[0] < shards // 2  # a fast tower is dealt some thirty at once


class Views(nn.Module):
    """Flattens with a view, impossible for a channels_last tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 4, 3, padding=1)
        self.linear = nn.Linear(4 * 36, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.convolution(images))
        return self.linear(x.view(len(x), -1))


def test_a_model_that_channels_last_breaks_is_trained_without_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model: Any = fit(Views, mean_square, TensorDataset(torch.rand(12, 1, 6, 6)), workers=2).model
    assert "channels_last is off" in capsys.readouterr().out
    assert model.convolution.weight.is_contiguous()


def test_a_shard_of_weight_zero_adds_nothing_even_if_its_loss_is_not_a_number() -> None:
    def loss(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        x, real = batch
        return {"loss": (model(x)[:, 0] * real).sum() / real.sum(), "weight": real.sum()}

    x, real = torch.rand(8, 6), torch.tensor([0.0, 0, 0, 0, 1, 1, 1, 1])
    digests = set()
    for rows, shards in ((8, 2), (4, 1)):
        data = TensorDataset(x[-rows:], real[-rows:])
        trained = fit(None, loss, data, batch_size=rows, shards=shards, epochs=1, shuffle=False)
        digests.add(digest_of(trained))
    assert len(digests) == 1


class Locked(nn.Linear):
    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("no copies")


MODELS = (lambda: Locked(4, 1), lambda: nn.LazyLinear(1), lambda: nn.ReLU(), lambda: 5, 5)


@pytest.mark.parametrize("model", MODELS)
def test_a_model_that_cannot_be_trained_is_refused(model: Any) -> None:
    def train() -> None:
        trainer = quorate.Trainer(model, mean_square, optimizer=sgd, batch_size=4, devices="cpu")
        list(trainer.updates(TensorDataset(torch.rand(4, 4))))

    with expect_error(SettingError):
        train()


class Once(torch.autograd.Function):
    """Raises in the first backward after arming, when later layers have their gradients."""

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
            self.first, self.last = nn.Linear(6, 4), nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(Once.apply(self.first(x)))

    def trained(step: int) -> str:
        def arm(_: Any, report: quorate.Report) -> None:
            Once.armed = report.global_step == step

        return digest_of(fit(Faulty, mean_square, epochs=1, workers=2, callbacks=[Calls(arm)]))

    digests = {trained(step) for step in (3, -1)}
    assert not Once.armed
    assert len(digests) == 1


@pytest.mark.parametrize(("dtype", "weight"), [(torch.bfloat16, 257), (torch.float16, 70_000)])
def test_a_weight_that_the_dtype_of_the_loss_cannot_hold_is_kept(
    dtype: torch.dtype, weight: int
) -> None:
    """257 is 256 in bfloat16, and 70,000 infinite in float16."""

    def loss(model: nn.Module, batch: Any) -> dict[str, Any]:
        return {"loss": model.weight.sum().to(dtype), "weight": weight}

    model = nn.Linear(1, 1, bias=False)
    before = model.weight.item()
    fit(model, loss, TensorDataset(torch.rand(12, 1)), epochs=1, workers=2)
    assert model.weight.item() == pytest.approx(before - 0.1, abs=1e-7)
