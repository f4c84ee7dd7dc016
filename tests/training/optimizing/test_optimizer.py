"""Each torch optimizer over flat vectors does what it does over ordinary parameters."""

from __future__ import annotations

import copy

import pytest
import torch
from support.messages import expect_error
from torch import nn

from quorate.errors import SettingError, UserError
from quorate.replica.buffers import Buffers
from quorate.replica.flat import Layout
from quorate.replica.model import bind, trainable
from quorate.replica.shard_sum import ShardSum
from quorate.training.optimizing import cores as taken
from quorate.training.optimizing import update
from quorate.training.optimizing.known_optimizers import ELEMENTWISE
from quorate.training.optimizing.optimizer import FlatOptimizer


def hooked(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD that clips the gradient of each parameter by itself."""
    optimizer = torch.optim.SGD(params, lr=0.1)

    def clip(optimizer: torch.optim.Optimizer, _arguments: object, _words: object) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            norm = parameter.grad.norm()
            parameter.grad = parameter.grad * (0.5 / (norm + 1e-6)).clamp(max=1.0)

    optimizer.register_step_pre_hook(clip)
    return optimizer


OPTIMIZERS = {
    "hooked": hooked,
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "SGD Nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, weight_decay=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "groups": lambda p: torch.optim.AdamW(
        [
            {"params": [q for q in p if q.ndim > 1], "weight_decay": 0.1},
            {"params": [q for q in p if q.ndim == 1], "weight_decay": 0.0, "lr": 0.001},
        ],
        lr=0.01,
    ),
    "one group of two": lambda p: torch.optim.SGD([p[0], p[3]], lr=0.1),
}


class Odd(nn.Module):
    """Sizes that are no multiples of anything, two dtypes, a frozen and a tied parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(7, 5)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.second = nn.Linear(5, 3).double()
        self.third = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.tied = nn.Linear(7, 5)
        self.tied.weight = self.first.weight


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_flat_and_ordinary_parameters_agree(name: str) -> None:
    flat_model, plain_model = Odd(), Odd()
    parameters = Layout(trainable(flat_model).items()).new(torch.device("cpu"))
    for key, parameter in trainable(flat_model).items():
        parameters.views[key].copy_(parameter.detach())
    bind(trainable(flat_model), parameters)
    flat = FlatOptimizer(OPTIMIZERS[name], flat_model, parameters)
    plain = OPTIMIZERS[name](list(trainable(plain_model).values()))
    assert flat.flat == (type(plain) in ELEMENTWISE and name != "hooked")
    generator = torch.Generator().manual_seed(1)
    for _ in range(12):
        gradient = parameters.layout.new(torch.device("cpu"))
        for key, parameter in trainable(plain_model).items():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            gradient.views[key].copy_(parameter.grad)
        plain.step()
        flat.step(gradient)
    for key, parameter in trainable(plain_model).items():
        tolerance = 1e-12 if parameter.dtype == torch.float64 else 2e-6
        mine = trainable(flat_model)[key]
        torch.testing.assert_close(mine, parameter, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_state_goes_through_parameter_names_and_back(name: str) -> None:
    model = Odd()
    parameters = Layout(trainable(model).items()).new(torch.device("cpu"))
    bind(trainable(model), parameters)
    first = FlatOptimizer(OPTIMIZERS[name], model, parameters)
    generator = torch.Generator().manual_seed(1)

    def random_gradient() -> object:
        gradient = parameters.layout.new(torch.device("cpu"))
        for view in gradient.views.values():
            view.copy_(torch.randn(view.shape, generator=generator))
        return gradient

    for _ in range(3):
        first.step(random_gradient())
    saved = copy.deepcopy(first.state())
    for key, entries in saved.items():
        for value in entries.values():
            if first.flat and isinstance(value, torch.Tensor) and value.ndim:
                assert value.shape == trainable(model)[key].shape
    second = FlatOptimizer(OPTIMIZERS[name], model, parameters)
    second.load(second.loadable(saved))
    before = [vector.clone() for vector in parameters.vectors]
    gradient = random_gradient()
    first.step(gradient)
    after_first = [vector.clone() for vector in parameters.vectors]
    for vector, value in zip(parameters.vectors, before, strict=True):
        vector.copy_(value)
    second.step(gradient)
    for vector, value in zip(parameters.vectors, after_first, strict=True):
        assert torch.equal(vector, value)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_on_many_cores_has_the_bits_of_one(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Odd lengths, so that each thread's stretch ends elsewhere than a vector register does."""

    def updated(cores: int) -> torch.Tensor:
        monkeypatch.setattr(taken, "usable_cores", lambda: cores)
        monkeypatch.setattr(taken, "ALL_CORES_FROM", 1)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(331, 401), nn.Linear(331, 13))
        parameters = Layout(trainable(model).items()).new(torch.device("cpu"))
        for key, parameter in trainable(model).items():
            parameters.views[key].copy_(parameter.detach())
        bind(trainable(model), parameters)
        apply = update.Update(
            FlatOptimizer(OPTIMIZERS[name], model, parameters),
            Buffers(model),
            clip_norm=1.0,
            average=update.Average(0.9, parameters),
        )
        generator = torch.Generator().manual_seed(1)
        for n in range(1, 4):
            parts = []
            for shard in range(3):
                gradient = parameters.new()
                for view in gradient.views.values():
                    view.copy_(torch.randn(view.shape, generator=generator))
                parts.append(((0, shard), ShardSum(7.0, {"loss": 1.0}, gradient)))
            apply.apply(parts, 3, n, present=3)
        assert apply.average is not None
        return torch.cat([*parameters.vectors, *apply.average.shadow.vectors])

    one = updated(1)
    assert torch.equal(updated(3), one)
    assert torch.equal(updated(4), one)


def test_what_is_no_optimizer_is_refused() -> None:
    model = nn.Linear(2, 2)
    parameters = Layout(trainable(model).items()).new(torch.device("cpu"))
    other = nn.Linear(2, 2)
    with expect_error(SettingError, name="optimizer", got="NoneType"):
        FlatOptimizer(lambda params: None, model, parameters)  # type: ignore[arg-type,return-value]
    with expect_error(UserError, name="optimizer"):
        FlatOptimizer(lambda params: torch.optim.SGD(other.parameters()), model, parameters)
