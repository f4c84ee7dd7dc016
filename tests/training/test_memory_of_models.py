"""Models whose tensors lie in memory in odd ways, or are of odd kinds."""

from functools import partial
from typing import Any

import pytest
import torch
from support.fits import fit
from support.messages import expect_error
from support.plain_loop import assert_close, plain_loop
from torch import nn
from torch.utils.data import TensorDataset

import quorate
from quorate.errors import SettingError

ROWS, STEPS = 8, 6
X = torch.randn(ROWS * STEPS, 3, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X)


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch[0]).abs().square().mean()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.b.weight.data = self.a.weight.data

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


class Expanded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1).expand(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


@pytest.mark.parametrize("model", [Tied, Expanded])
def test_parameters_that_share_elements_are_refused_by_name(model: type[nn.Module]) -> None:
    with expect_error(SettingError, name="model"):
        fit(model(), loss, DATA, batch_size=ROWS, shards=None)


class Aliased(nn.Module):
    """Has buffers in the memory of a parameter, and of a row of the parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("same", self.layer.weight.data)
        self.register_buffer("row", self.layer.weight.data[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + x @ self.same.T + self.row


class Columns(nn.Module):
    """Has two parameters as columns of one matrix: they have no element in common."""

    def __init__(self) -> None:
        super().__init__()
        both = torch.randn(3, 6)
        self.left, self.right = nn.Parameter(both[:, :3]), nn.Parameter(both[:, 3:])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.left) @ self.right


@pytest.mark.parametrize(("workers", "clip_norm"), [(1, None), (2, 0.5)])
@pytest.mark.parametrize("model", [Aliased, Columns])
def test_it_is_the_plain_loop(
    model: type[nn.Module], workers: int, clip_norm: float | None
) -> None:
    def seeded() -> nn.Module:  # a deep copy would part shared memory
        torch.manual_seed(0)
        return model()

    plain: Any = seeded()
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    plain_loop(plain, sgd, loss, DATA, steps=STEPS, batch_size=ROWS, clip_norm=clip_norm)
    run = fit(
        seeded(), loss, DATA, optimizer=sgd, batch_size=ROWS, shards=3, workers=workers,
        shuffle=False, clip_norm=clip_norm,
    )  # fmt: skip
    assert_close(run.model, plain, 2e-5)


class Strided(nn.Module):
    """Reads elements by their places in memory, different in channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 4, 3, padding=1)
        self.drop = nn.Dropout(0.5)
        self.layer = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.drop(self.convolution(x))
        return self.layer(y.as_strided((len(y), 16), (36, 1)))


class Ordinary(Strided):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.drop(self.convolution(x)).flatten(1)[:, :16])


@pytest.mark.parametrize("model", [Strided, Ordinary])
def test_a_model_that_channels_last_would_change_is_trained_without(
    model: type[Strided], caplog: pytest.LogCaptureFixture
) -> None:
    images = torch.randn(8, 1, 3, 3, generator=torch.Generator().manual_seed(0))
    sizes = {"batch_size": 4, "shards": 2, "devices": "cpu", "workers": 1}
    run = quorate.Trainer(model(), loss, optimizer=torch.optim.SGD, **sizes)
    assert len([*run.updates(TensorDataset(images))]) == 2
    is_off = "channels_last is off: the model has a different loss or gradient" in caplog.text
    assert is_off == (model is Strided)
    strides = run.model.convolution.weight.stride()
    assert (strides == (9, 9, 3, 1)) == is_off
