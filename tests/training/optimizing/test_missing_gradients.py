"""Parameters that no shard of a step gives a gradient: as in a plain loop of torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.front_door import trainer
from torch import nn
from torch.utils.data import TensorDataset

from quorate.replica.digest import digest

STEPS, ROWS, SHARDS = 30, 12, 4
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05),
    "SGD momentum, decay": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, weight_decay=0.05),
    "SGD dampening": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.8, dampening=0.3),
    "SGD Nesterov": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.05, eps=1e-4),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, eps=1e-4),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, eps=1e-4),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.005, momentum=0.9, centered=True, eps=1e-3),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, lr_decay=0.01, eps=1e-4),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01, eps=1e-4),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01, eps=1e-4),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01, eps=1e-4),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5, eps=1e-4),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.05, t0=5.0),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "groups": lambda p: torch.optim.AdamW(
        [
            {"params": [q for q in p if q.ndim > 1], "weight_decay": 0.1},
            {"params": [q for q in p if q.ndim == 1], "weight_decay": 0.0, "lr": 0.003},
        ],
        lr=0.01,
        eps=1e-4,
    ),
}


class Experts(nn.Module):
    """Each row goes to one expert; some are met by no row of a shard, or of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.experts = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))
        self.last = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        mixed = torch.zeros_like(x)
        for number, layer in enumerate(self.experts):
            rows = (expert == number).nonzero()[:, 0]
            if len(rows):
                mixed = mixed.index_add(0, rows, layer(x[rows]))
        return self.last(mixed + x)


class Branches(nn.Module):
    """A step takes one branch as a whole, and a layer is left out of some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 5), nn.Linear(3, 5)
        self.sometimes = nn.Linear(5, 5)
        self.never = nn.Linear(2, 2)
        self.last = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor, branch: torch.Tensor) -> torch.Tensor:
        taken = int(branch[0]) % 2
        x = torch.tanh((self.right if taken else self.left)(x))
        if int(branch[0]) == 3:
            x = x + torch.tanh(self.sometimes(x))
        return self.last(x)


class Gated(nn.Module):
    """Gates that many rows close: of a whole shard at times; one expert begins late."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.late = nn.Parameter(torch.full((3, 1), 0.1))
        self.always = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        out = self.always(x * self.scale) if bool((step > 0).any()) else self.always(x)
        return out + x @ self.late if bool((step == 3).any()) else out


def data_of(model: str, dtype: torch.dtype) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    rows = STEPS * ROWS
    x = torch.randn(rows, 3, generator=generator, dtype=torch.float64)
    y = x.sin().sum(1, keepdim=True)
    if model == "experts":  # the last one seldom: some steps have no row for it
        route = torch.multinomial(
            torch.tensor([5.0, 3.0, 0.5, 0.1]), rows, True, generator=generator
        )
    else:
        per_step = torch.randint(0, 4, (STEPS,), generator=generator)
        per_step[:4] = torch.tensor([0, 1, 0, 2])
        route = per_step.repeat_interleave(ROWS)
    return TensorDataset(x.to(dtype), route, y.to(dtype))


MODELS: dict[str, type[nn.Module]] = {"experts": Experts, "branches": Branches, "gated": Gated}


def made(name: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().to(dtype)


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    x, route, y = batch
    return (model(x, route) - y).square().mean()


def plain(name: str, dtype: torch.dtype, optimizer: Callable[[Any], Any]) -> nn.Module:
    model = made(name, dtype)
    tensors = data_of(name, dtype).tensors
    inner = optimizer(list(model.parameters()))
    for step in range(STEPS):
        rows = slice(step * ROWS, (step + 1) * ROWS)
        inner.zero_grad()
        loss(model, [tensor[rows] for tensor in tensors]).backward()
        inner.step()
    return model


def trained(
    name: str, dtype: torch.dtype, optimizer: Callable[[Any], Any], workers: int, **settings: Any
) -> nn.Module:
    run = trainer(
        made(name, dtype),
        loss,
        optimizer=optimizer,
        batch_size=ROWS,
        shards=SHARDS,
        devices="cpu",
        workers=workers,
        engine="towers",
        **settings,
    )
    for steps in (STEPS // 3, STEPS):
        run.fit(data_of(name, dtype), steps=steps, shuffle=False)
    return run.model


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("optimizer", "dtype"),
    [
        *((optimizer, torch.float64) for optimizer in OPTIMIZERS),
        *((optimizer, torch.float32) for optimizer in ("SGD momentum, decay", "AdamW", "groups")),
    ],
)
def test_it_is_the_plain_loop(name: str, optimizer: str, dtype: torch.dtype) -> None:
    expected = plain(name, dtype, OPTIMIZERS[optimizer])
    found = trained(name, dtype, OPTIMIZERS[optimizer], workers=1)
    most = 1e-6 if dtype == torch.float32 else 1e-12
    values = dict(expected.named_parameters())
    for label, parameter in found.named_parameters():
        torch.testing.assert_close(parameter, values[label], rtol=most, atol=most, msg=label)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("optimizer", ["SGD momentum, decay", "AdamW", "groups", "ASGD"])
def test_the_bits_are_the_same_on_more_towers_and_after_a_resume(
    name: str, optimizer: str, tmp_path: Path
) -> None:
    made_of = [
        trained(name, torch.float32, OPTIMIZERS[optimizer], workers) for workers in (1, 2, 3)
    ]
    for number, steps in enumerate((1, 2, 4, 5, 11, STEPS)):  # each in a trainer of its own
        run = trainer(
            made(name, torch.float32),
            loss,
            optimizer=OPTIMIZERS[optimizer],
            batch_size=ROWS,
            shards=SHARDS,
            devices="cpu",
            workers=1 + number % 3,
            engine="towers",
            run_dir=str(tmp_path),
        )
        run.fit(data_of(name, torch.float32), steps=steps, shuffle=False)
    made_of.append(run.model)
    assert len({digest(model.state_dict().items()) for model in made_of}) == 1


def test_a_parameter_that_never_has_a_gradient_stays_as_it_is() -> None:
    before = copy.deepcopy(made("branches", torch.float32).never)
    after = trained("branches", torch.float32, OPTIMIZERS["AdamW"], workers=2).never
    assert torch.equal(before.weight, after.weight)
    assert torch.equal(before.bias, after.bias)
