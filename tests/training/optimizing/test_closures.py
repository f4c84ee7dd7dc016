"""Optimizers that want a step's gradient at other parameters too: LBFGS, sharpness-aware ones."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.messages import expect_error
from support.warm import WARM
from torch import nn

import quorate
from quorate.coordination.plan import Plan
from quorate.errors import NotFiniteError, SettingError
from quorate.replica.digest import digest

SCRIPT = Path(__file__).parents[2] / "scripts" / "closures.py"
_spec = importlib.util.spec_from_file_location("closures", SCRIPT)
assert _spec is not None
assert _spec.loader is not None
script = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(script)

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Polite(torch.optim.SGD):
    """Calls its closure first, if it has one, as torch's own do."""

    calls = 0

    def step(self, closure: Any = None) -> Any:
        Polite.calls += closure is not None
        return super().step(closure)


class Assigns(script.SAM):
    """Moves by assignment, and holds the memory that the parameters were in."""

    @torch.no_grad()
    def first_step(self) -> None:
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in held]).norm()
        for p in held:
            self.state[p]["before"] = p.data
            p.data = p.data + p.grad * self.param_groups[0]["rho"] / (norm + 1e-12)


class Drops(torch.optim.SGD):
    """Throws away the gradient that it is given, and asks for it."""

    def step(self, closure: Any = None) -> Any:
        self.zero_grad()
        return super().step(closure)


class Scales(torch.optim.SGD):
    """Scales a gradient in its place, asks for it again at the same parameters, and adds both."""

    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure()
        held = [p for group in self.param_groups for p in group["params"]]
        halves = [p.grad.mul_(0.5) for p in held]  # type: ignore[union-attr]
        closure()
        for p, half in zip(held, halves, strict=True):
            p.grad.add_(half)  # type: ignore[union-attr]
        super().step()


OPTIMIZERS: dict[str, Make] = {
    **script.OPTIMIZERS,
    "polite": lambda p: Polite(p, lr=0.1),
    "assigns": lambda p: Assigns(p, torch.optim.SGD, lr=0.1, momentum=0.9),
    "drops": lambda p: Drops(p, lr=0.1),
    "scales": lambda p: Scales(p, lr=0.1),
}


def trained(
    make: Make | quorate.Optimize, workers: int = 1, steps: int = script.STEPS, **options: Any
) -> quorate.Trainer:
    trainer = quorate.Trainer(
        options.pop("model", script.model),
        script.loss,
        optimizer=make,
        batch_size=script.BATCH,
        shards=script.SHARDS,
        devices="cpu",
        workers=workers,
        **options,
    )
    trainer.fit(script.data(), steps=steps)
    return trainer


def without_dropout() -> nn.Module:
    model = script.model()
    model[2].p = 0.0
    return model


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_are_those_of_a_plain_loop(name: str) -> None:
    model, (x, labels) = without_dropout().double(), script.data().tensors
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    average = [p.detach().clone() for p in model.parameters()]
    plan = Plan(rows=script.ROWS, batch_size=script.BATCH, shards=script.SHARDS, seed=0)
    for step in range(script.STEPS):
        shards = [plan.shard(step, shard) for shard in range(script.SHARDS)]
        rows = torch.cat([torch.as_tensor(list(shard)) for shard in shards])

        def closure(rows: torch.Tensor = rows) -> torch.Tensor:
            optimizer.zero_grad()
            loss = script.loss(model, (x[rows].double(), labels[rows]))
            loss.backward()
            return loss

        if name in ("sam", "assigns"):
            closure()
        optimizer.step(closure)
        for mean, p in zip(average, model.parameters(), strict=True):
            mean.lerp_(p.detach(), 1 - min(0.9, (2 + step) / (11 + step)))

    def wide() -> nn.Module:
        return without_dropout().double()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return script.loss(model, (batch[0].double(), batch[1]))

    ours = quorate.Trainer(
        wide, loss, optimizer=quorate.Optimize(OPTIMIZERS[name], ema_decay=0.9),
        batch_size=script.BATCH, shards=script.SHARDS, devices="cpu", workers=1, seed=0,
    )  # fmt: skip
    ours.fit(script.data(), steps=script.STEPS)
    assert ours.averaged_model is not None
    for mine, theirs in zip(ours.averaged_model.parameters(), average, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)
    for mine, theirs in zip(ours.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", [*script.OPTIMIZERS, "assigns"])
def test_one_digest_on_any_number_of_workers_and_after_a_resume(name: str, tmp_path: Path) -> None:
    make = OPTIMIZERS[name]
    expected = digest(trained(make).model.state_dict().items())
    trained(make, workers=3, steps=4, run_dir=tmp_path / "run")
    resumed = trained(make, workers=2, run_dir=tmp_path / "run")
    assert digest(resumed.model.state_dict().items()) == expected


def test_what_is_known_already_is_not_computed_again() -> None:
    """An optimizer with an optional closure calls it first: at the parameters of the gradient."""
    calls = [0]

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        calls[0] += 1
        return script.loss(model, batch)

    def count(make: Make) -> int:
        calls[0] = 0
        trainer = quorate.Trainer(
            script.model, loss, optimizer=make, batch_size=24, shards=3, devices="cpu", workers=1,
            compute=quorate.Compute(spot_check_every=0),
        )  # fmt: skip
        trainer.fit(script.data(), steps=3)
        return calls[0]

    Polite.calls = 0
    plain = count(lambda p: torch.optim.SGD(p, lr=0.1))
    assert count(OPTIMIZERS["polite"]) == plain
    assert Polite.calls == 3
    assert count(OPTIMIZERS["sam"]) == plain + 3 * 3


@pytest.mark.parametrize("update", ["async", "bounded:1", "quorum:2"])
def test_other_rules_are_refused_if_one_is_needed(update: str) -> None:
    with expect_error(SettingError, name="update"):
        trained(OPTIMIZERS["lbfgs"], 2, update=update)
    trained(OPTIMIZERS["polite"], 2, update=update)


def test_who_raises_where_a_step_is_computed_again_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Another worker computes the shard: the run goes on, and does not hide it."""
    raises = [False]

    class Raises(script.SAM):
        steps = 0

        def step(self, closure: Any = None) -> Any:
            Raises.steps += 1
            raises[0] = Raises.steps == 3
            return super().step(closure)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if raises[0]:
            raises[0] = False
            raise ValueError("once")
        return script.loss(model, batch)

    trainer = quorate.Trainer(
        script.model, loss, optimizer=lambda p: Raises(p, torch.optim.SGD, lr=0.1, momentum=0.9),
        batch_size=24, shards=3, devices="cpu", workers=quorate.Workers(2, engine="towers"),
        compute=quorate.Compute(spot_check_every=0), seed=0,
    )  # fmt: skip
    trainer.fit(script.data(), steps=script.STEPS)
    assert "ValueError: once" in capsys.readouterr().out
    expected = trained(OPTIMIZERS["sam"], seed=0).model.state_dict()
    assert digest(trainer.model.state_dict().items()) == digest(expected.items())


def test_a_move_to_where_nothing_is_finite_ends_the_run(tmp_path: Path) -> None:
    trained(OPTIMIZERS["sam"], steps=2, run_dir=tmp_path)
    far = script.SAM

    def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return far(params, torch.optim.SGD, rho=1e38, lr=0.1, momentum=0.9)

    with expect_error(NotFiniteError):
        trained(make)


def ended(*words: str) -> str:
    code, out, err = WARM.run(["run", str(SCRIPT), *words], dict(os.environ), 200)
    assert code == 0, out + err
    return out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sam", "lbfgs"])
def test_one_digest_on_processes_that_are_killed_meanwhile(name: str, tmp_path: Path) -> None:
    def digests(out: str) -> list[str]:
        return [line for line in out.splitlines() if line.startswith("digest ")]

    expected = digests(ended(name, "towers", "1"))
    assert digests(ended(name, "processes", "3")) == expected
    out = ended(name, "processes", "2", str(tmp_path))
    assert digests(out) == expected
    assert {path.name for path in tmp_path.iterdir()} == {"killed-0", "killed-1"}
    assert out.count("killed by signal 9") == 2
