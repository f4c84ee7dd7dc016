"""Optimizers that need a step's gradient at other parameters too: LBFGS, sharpness-aware."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.digests import digest_of
from support.fits import fit
from support.messages import expect_error
from support.plain_loop import Make, assert_close, plain_loop
from torch import nn
from torch.utils.data import TensorDataset

import quorate
from quorate.errors import NotFiniteError, SettingError

ROWS, BATCH, SHARDS, STEPS = 72, 24, 3, 6


def rows() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, 6, generator=generator)
    return TensorDataset(x, torch.randint(0, 3, (ROWS,), generator=generator))


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3))


def entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    x, labels = batch
    return F.cross_entropy(model(x), labels)


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation (Foret et al., 2021), around another optimizer, as usual."""

    def __init__(self, params: Any, base: type, rho: float = 0.05, **options: Any) -> None:
        super().__init__(params, {"rho": rho, **options})
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in held]).norm()
        for p in held:
            self.state[p]["before"] = p.detach().clone()
            p.add_(p.grad * self.param_groups[0]["rho"] / (norm + 1e-12))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is not None, "SAM needs a closure"
        self.first_step()
        with torch.enable_grad():
            closure()
        for p, kept in self.state.items():
            p.data = kept["before"]  # as mostly written: another tensor's memory
        self.base.step()


class Polite(torch.optim.SGD):
    """Calls its closure first, if given, as torch's optimizers do."""

    calls = 0

    def step(self, closure: Any = None) -> Any:
        Polite.calls += closure is not None
        return super().step(closure)


class Scales(torch.optim.SGD):
    """Scales a gradient in place, asks for the gradient again at the same parameters, adds both."""

    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure()
        held = [p for group in self.param_groups for p in group["params"]]
        halves = [p.grad.mul_(0.5) for p in held]  # type: ignore[union-attr]
        closure()
        for p, half in zip(held, halves, strict=True):
            p.grad.add_(half)  # type: ignore[union-attr]
        super().step()


OPTIMIZERS: dict[str, Make] = {
    "sam": lambda p: SAM(p, torch.optim.SGD, lr=0.1, momentum=0.9),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=4),
    "wolfe": lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=2, line_search_fn="strong_wolfe"),
    "polite": lambda p: Polite(p, lr=0.1),
    "scales": lambda p: Scales(p, lr=0.1),
}


def trained(
    make: Make, model: Any = network, loss: Any = entropy, **options: Any
) -> quorate.Trainer:
    sizes = {"batch_size": BATCH, "shards": SHARDS, "steps": STEPS}
    return fit(model, loss, rows(), optimizer=make, **sizes | {"workers": 1} | options)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_are_those_of_a_plain_loop_on_any_workers_and_after_a_resume(
    name: str, tmp_path: Path
) -> None:
    def wide() -> nn.Module:
        model = network().double()
        model[2].p = 0.0
        return model

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return entropy(model, (batch[0].double(), batch[1]))

    plain = wide()
    steps, size = STEPS, BATCH
    plain_loop(
        plain, OPTIMIZERS[name], loss, rows(), steps=steps, batch_size=size,
        is_closure=True,
    )  # fmt: skip
    ours = trained(OPTIMIZERS[name], wide, loss, shuffle=False)
    assert_close(ours.model, plain, 1e-9)
    if name in ("sam", "lbfgs"):  # in single precision, and with dropout
        run_dir = tmp_path / "run"
        trained(OPTIMIZERS[name], workers=3, steps=4, run_dir=run_dir)
        resumed = trained(OPTIMIZERS[name], workers=2, run_dir=run_dir)
        assert digest_of(resumed) == digest_of(trained(OPTIMIZERS[name]))


def test_what_is_known_already_is_not_computed_again() -> None:
    """Count calls: an optimizer with an optional closure calls first, at the same parameters."""
    calls = [0]

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        calls[0] += 1
        return entropy(model, batch)

    def count(make: Make) -> int:
        calls[0] = 0
        trained(make, loss=loss, steps=3, spot_check_every=0)
        return calls[0]

    Polite.calls = 0
    plain = count(lambda p: torch.optim.SGD(p, lr=0.1))
    assert count(OPTIMIZERS["polite"]) == plain
    assert Polite.calls == 3
    assert count(OPTIMIZERS["sam"]) == plain + 3 * 3


@pytest.mark.parametrize("update", ["async", "quorum:2"])
def test_other_rules_are_refused_if_one_is_needed(update: str) -> None:
    with expect_error(SettingError, name="update"):
        trained(OPTIMIZERS["lbfgs"], workers=2, update=update)
    trained(OPTIMIZERS["polite"], workers=2, update=update, steps=1)


def test_a_move_to_where_nothing_is_finite_ends_the_run() -> None:
    with expect_error(NotFiniteError):
        trained(lambda p: SAM(p, torch.optim.SGD, rho=1e38, lr=0.1, momentum=0.9))
