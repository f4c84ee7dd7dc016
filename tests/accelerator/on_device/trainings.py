"""Models hard for devices have the CPU's digest, on any number of devices."""

from functools import partial
from typing import Any

import pytest
import torch
from support.digests import digest_of
from support.fits import fit, rows
from torch import nn
from torch.utils.checkpoint import checkpoint

import quorate


def digest(model: Any, devices: str, **settings: Any) -> str:
    torch.manual_seed(0)
    settings = {"epochs": 4, "batch_size": 24, "devices": devices, **settings}
    with torch.accelerator.device_index(3):  # a device without a model
        return digest_of(fit(model(), loss, rows(48), optimizer=torch.optim.Adam, **settings))


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(computed := model(batch[0]), torch.zeros_like(computed))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 1)

    def part(self, x: torch.Tensor) -> torch.Tensor:
        assert x.device == torch.empty(1, device=x.device.type).device
        return self.drop(self.first(x)).tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(checkpoint(self.part, x, use_reentrant=False))


class ReadsShared(Plain):
    """Once more in the backward pass, in autograd's thread of the device."""

    def __init__(self) -> None:
        super().__init__()
        scale, teacher = torch.arange(8.0), nn.Linear(8, 8).eval()
        self.values = quorate.Shared("values", scale=scale, teacher=teacher)

    def part(self, x: torch.Tensor) -> torch.Tensor:
        return self.values.teacher(super().part(x) * self.values.scale)


class LeavesTraces(Plain):
    """Leaves traces in the generators of all devices, and in autocast."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.first(x))
        with torch.random.fork_rng():
            torch.manual_seed(7)
            x = x + 0.01 * torch.randn(x.shape, device=x.device)
        torch.manual_seed(8)
        x = self.last(self.drop(x))
        torch.set_autocast_dtype(x.device.type, torch.bfloat16)
        torch.set_autocast_enabled(x.device.type, True)
        return x


@pytest.mark.filterwarnings("ignore:SIM reports")  # of fork_rng on all devices
@pytest.mark.parametrize("model", [Plain, ReadsShared, LeavesTraces])
def test_towers_do_not_disturb_each_other(model: Any) -> None:
    validation = quorate.Validation(rows(12), every_steps=4, best="min:loss")
    expected = digest(model, "cpu", workers=1)
    assert digest(model, "sim:1", validation=validation) == expected
    assert digest(model, "sim:0,sim:1,sim:2,sim:0") == expected
    assert digest(model, "cpu,sim:1") == expected
    if model is Plain:
        assert digest(model, "sim:0,sim:1", random="host") == expected


class AsksWhereAValueLies(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(self.first, nn.BatchNorm1d(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        if hidden.device.type != x.device.type or not (x.is_cpu or x.is_sim):
            hidden = hidden * 2
        low = self.last(self.drop(hidden))
        with torch.autocast(low.device.type, enabled=False):
            return low + torch.arange(1, device=low.device) + torch.zeros(1).to(low.device.type)


class HasFunctionsInCheckpoints(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.register_forward_hook(lambda _, inputs, output: output * 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.part, x, use_reentrant=False) * self.scale  # as in the second stage
        low, drops = self.last(x), [self.drop]
        return checkpoint(lambda a, b: drops[0](a * b * self.scale), low, x, use_reentrant=True)


class HasACheckpointAfterTheCut(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.last = Upper()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(self.first(x)))


class Upper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.middle, self.last = nn.Linear(8, 8), nn.Linear(8, 1)

    def part(self, x: torch.Tensor) -> torch.Tensor:
        return torch.dropout(self.middle(x), 0.3, self.training).tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(checkpoint(self.part, x, use_reentrant=False))


STAGES = [AsksWhereAValueLies, HasFunctionsInCheckpoints, HasACheckpointAfterTheCut]


@pytest.mark.parametrize("devices", ["sim:0+sim:1", "sim:1+sim:1"])
@pytest.mark.parametrize("model", STAGES)
def test_a_model_in_stages_has_the_bits_of_one_piece(model: Any, devices: str) -> None:
    assert digest(model, devices, split="last") == digest(model, "cpu", workers=1)


class ReadsItsOwnStep(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.values = quorate.Shared("values", step=0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(checkpoint(self.check, x, self.values.step, use_reentrant=False))

    def check(self, x: torch.Tensor, step: int) -> torch.Tensor:
        assert self.values.step == step
        return self.part(x)


def test_towers_on_one_device_read_their_own_shared() -> None:
    """Values of different steps on each tower: in autograd's thread of the device too."""
    model, adam, devices = ReadsItsOwnStep(), torch.optim.Adam, "sim:0,sim:0"
    how = {"batch_size": 4, "update": "async", "devices": devices}
    trainer = quorate.Trainer(model, loss, optimizer=adam, **how)
    for report in trainer.updates(rows(48), epochs=4):
        model.values.step = report.global_step


class Spread(nn.Module):
    def __init__(self, one: str, other: str) -> None:
        super().__init__()
        self.lower = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU()).to(one)
        self.drop, self.upper = nn.Dropout(0.3), nn.Linear(8, 1).to(other)
        self.upper.register_buffer("shift", torch.ones(1, device=other))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.device == self.lower[0].weight.device
        x = self.drop(self.lower(x).to(self.upper.weight.device))
        torch.manual_seed(7)  # on both devices
        return self.upper(self.drop(x)) + self.upper.shift


def test_a_model_that_is_spread_gives_the_bits_of_one_that_is_not() -> None:
    expected = digest(partial(Spread, "cpu", "cpu"), "cpu", engine="towers", workers=1)
    of_both = digest(partial(Spread, "sim:0", "sim:1"), "sim:0+sim:1", engine="towers")
    mixed = digest(partial(Spread, "cpu", "sim:1"), "cpu+sim:1,sim:1+cpu", engine="towers")
    assert of_both == mixed == expected
