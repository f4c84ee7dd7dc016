"""What is kept from the first shard on: a state is named, a cache is not.

None of these gives another result when a shard is computed again, and of one worker alone no two
results differ. After a resume they would.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import quorate

DRAW = torch.Generator().manual_seed(0)
X = torch.randn(24, 4, generator=DRAW)
Loss = Callable[[nn.Module, Any], torch.Tensor]


def plain(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    value: torch.Tensor = model(x).square().mean()
    return value


class Largest(nn.Linear):
    """Scales by the largest value so far."""

    largest = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.largest = max(self.largest, float(x.abs().max()))
        return super().forward(x / self.largest)


class FirstBatch(nn.Linear):
    mean: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mean is None:
            self.mean = x.mean(0)
        y: torch.Tensor = super().forward(x - self.mean)
        return y


class FirstNorm(nn.Linear):
    @functools.cached_property
    def first(self) -> torch.Tensor:
        norm: torch.Tensor = self.weight.detach().norm()
        return norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight / self.weight.norm() * self.first, self.bias)


class Basis(nn.Linear):
    @functools.lru_cache(maxsize=4)  # noqa: B019  as strangers write it
    def basis(self) -> torch.Tensor:
        basis: torch.Tensor = torch.linalg.qr(self.weight.detach().T)[0]
        return basis

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = super().forward(x) @ self.basis().T
        return y


def anchored() -> Loss:
    """L2-SP: a term over the distance from where the first call found the weights."""
    start: dict[str, torch.Tensor] = {}

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if not start:
            start.update((name, p.detach().clone()) for name, p in model.named_parameters())
        far = sum((p - start[name]).square().sum() for name, p in model.named_parameters())
        return plain(model, x) + far

    return loss


def anchored_by_a_variable() -> Loss:
    start: torch.Tensor | None = None

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        nonlocal start
        (weight, *_) = model.parameters()
        if start is None:
            start = weight.detach().clone()
        return plain(model, x) + (weight - start).square().sum()

    return loss


def warms_up() -> Loss:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss.calls = getattr(loss, "calls", 0) + 1  # type: ignore[attr-defined]
        return plain(model, x) * (2 if loss.calls > 20 else 1)  # type: ignore[attr-defined]

    return loss


STATES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Loss], str]] = {
    "largest": (lambda: Largest(4, 2), lambda: plain, "largest (Largest, test_history.py:"),
    "first batch": (lambda: FirstBatch(4, 2), lambda: plain, "mean (FirstBatch, test_history.py:"),
    "first norm": (lambda: FirstNorm(4, 2), lambda: plain, "first (FirstNorm) is set"),
    "basis": (lambda: Basis(4, 2), lambda: plain, "Basis.basis (class attribute) is set"),
    "anchored": (
        lambda: nn.Linear(4, 2),
        anchored,
        "'start' in the closure of the loss function is",
    ),
    "variable": (lambda: nn.Linear(4, 2), anchored_by_a_variable, "'start' in the closure of"),
    "attribute": (lambda: nn.Linear(4, 2), warms_up, "the attribute 'calls' of the loss function"),
}


class Mask(nn.Linear):
    """A mask by length, positions in a cache of functools, the last output for whoever looks."""

    @functools.lru_cache(maxsize=4)  # noqa: B019
    def mask(self, length: int) -> torch.Tensor:
        return torch.ones(length)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = super().forward(x * self.mask(x.shape[1]) + _positions(x.shape[1]))
        return self.last


@functools.cache
def _positions(length: int) -> torch.Tensor:
    return torch.arange(float(length))


def noting_the_best() -> Loss:
    """Notes the smallest loss so far, on which nothing depends."""
    best = {"loss": float("inf")}

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        value = plain(model, x)
        best["loss"] = min(best["loss"], float(value.detach()))
        return value

    return loss


CACHES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Loss]]] = {
    "mask": (lambda: Mask(4, 2), lambda: plain),
    "best": (lambda: nn.Linear(4, 2), noting_the_best),
}


def trained(model: nn.Module, loss: Loss, workers: int) -> list[str]:
    trainer = quorate.Trainer(
        model,
        loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        batch_size=12,
        shards=3,
        devices="cpu",
        workers=quorate.Workers(workers, engine="towers"),
    )
    found: list[str] = []
    for report in trainer.updates(X, steps=4, shuffle=False):
        found += report.doubts
    return found


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", STATES)
def test_a_state_is_named_before_it_matters(kind: str, workers: int) -> None:
    make_model, make_loss, expected = STATES[kind]
    said = trained(make_model(), make_loss(), workers)
    assert said[0].startswith(expected), said


@pytest.mark.parametrize("kind", CACHES)
def test_a_cache_is_not(kind: str) -> None:
    make_model, make_loss = CACHES[kind]
    assert trained(make_model(), make_loss(), 1) == []


def test_what_the_script_keeps_is_as_the_first_shard_left_it() -> None:
    """Looking for states computes from other parameters: an anchor must not be one of those."""
    held: dict[str, torch.Tensor] = {}

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        (weight, *_) = model.parameters()
        held.setdefault("start", weight.detach().clone())
        return plain(model, x) + (weight - held["start"]).square().sum()

    model = nn.Linear(4, 2)
    start = model.weight.detach().clone()
    assert trained(model, loss, 1)
    assert torch.equal(held["start"], start)
