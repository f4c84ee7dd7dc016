"""State of optimizers and schedules outlives a resume, wherever kept; or the state is named."""

from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import prodigyopt
import pytest
import schedulefree
import torch
from support.digests import digest_of
from support.fits import Calls, fit, squares
from support.messages import expect_error
from support.plain_loop import Make, assert_close, plain_loop
from torch import nn
from torch.optim import SGD, Adam, Optimizer, lr_scheduler
from torch.utils.data import TensorDataset

import quorate
from quorate.errors import CheckpointError, UserError

STEPS = 11
X = torch.randn(24, 5, generator=torch.Generator().manual_seed(0))
Y = torch.randn(24, 1, generator=torch.Generator().manual_seed(1))
DATA, HELD_OUT = TensorDataset(X, Y), TensorDataset(X[:6], Y[:6])
Params = list[nn.Parameter]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))


# --- optimizers -----------------------------------------------------------------------------------


class Own(Optimizer):
    """The common part of the optimizers below: they say how far to go from a gradient."""

    def __init__(self, params: Params, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    def held(self) -> Params:
        return [p for group in self.param_groups for p in group["params"]]

    def moved(self, number: int, parameter: Any) -> torch.Tensor:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for number, parameter in enumerate(self.held()):
            parameter.sub_(self.moved(number, parameter), alpha=self.param_groups[0]["lr"])


class Lookahead(Optimizer):
    """Wraps another optimizer, and has slow weights in an attribute, by parameter."""

    def __init__(self, base: Optimizer) -> None:
        self.base, self.count = base, 0
        super().__init__(base.param_groups[0]["params"], {"lr": base.param_groups[0]["lr"]})
        self.param_groups = base.param_groups
        self.slow = {p: p.detach().clone() for g in self.param_groups for p in g["params"]}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.base.step(closure)
        self.count += 1
        if self.count % 3 == 0:
            for parameter, slow in self.slow.items():
                slow.lerp_(parameter, 0.5)
                parameter.copy_(slow)


class Odd(Own):
    """Keeps all kinds of values, and steps by each of them."""

    def __init__(self, params: Params, lr: float = 0.05) -> None:
        super().__init__(params, lr)
        self.param_groups[0].update({"k": 0, "span": (0.5, None), "sum": 0.0})
        self.history: list[float] = []
        self.nested: Any = defaultdict(dict)
        self.total = torch.zeros((), dtype=torch.float64)

    def step(self, closure: Any = None) -> None:
        group = self.param_groups[0]
        group["k"] += 1
        group["sum"] += 1 / group["k"]
        self.history = [*self.history[-2:], group["sum"]]
        self.total += 0.125
        super().step()

    def moved(self, number: int, parameter: Any) -> torch.Tensor:
        state = self.state[parameter]
        if not state:
            shape, turned = parameter.shape, [1, len(parameter)][: parameter.ndim]
            state["past"], state["mode"], state["pair"] = [], "slow", (1, torch.ones(2))
            state["double"] = torch.zeros_like(parameter, dtype=torch.float64)
            state["turned"] = torch.empty_strided(shape, turned)
            state["table"] = {0: 1.5, "a": None}
        state["double"] += parameter.grad.double() * 1e-9
        state["turned"] = state["turned"].copy_(parameter)
        state["past"] = [*state["past"][-1:], parameter.grad.clone()]
        state["table"][0] += 0.5
        self.nested[number]["seen"] = self.nested[number].get("seen", 0) + 1
        speed = 1.0 if state["mode"] == "slow" else 7.0
        speed *= float(self.total) + self.history[0] + state["table"][0]
        speed += self.nested[number]["seen"] + state["pair"][0]
        mean = sum(state["past"]) / len(state["past"])
        return 0.01 * speed * (mean + state["double"].float())  # type: ignore[no-any-return]


class Late(Own):
    """Makes all state in the first step."""

    def moved(self, number: int, parameter: Any) -> torch.Tensor:
        if not hasattr(self, "counts"):
            self.counts: Any = defaultdict(int)
        self.counts[number] += 1
        return parameter.grad / self.counts[number]  # type: ignore[no-any-return]


class Noisy(Own):
    """Draws from torch's default generator, and from a private generator."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self.generator = torch.Generator().manual_seed(3)

    def moved(self, number: int, parameter: Any) -> torch.Tensor:
        noise = torch.randn(parameter.shape, generator=self.generator)
        return parameter.grad + 0.1 * torch.randn_like(parameter) + 0.1 * noise  # type: ignore[no-any-return]


OPTIMIZERS: dict[str, Make] = {
    "schedulefree": lambda p: schedulefree.AdamWScheduleFree(p, lr=0.05, warmup_steps=3),
    "prodigy": lambda p: prodigyopt.Prodigy(p, lr=1.0, safeguard_warmup=True),
    "muon": lambda p: torch.optim.Muon([q for q in p if q.ndim > 1], lr=0.05),
    "lookahead": lambda p: Lookahead(Adam(p, lr=0.05)),
    "odd": Odd,
    "late": Late,
    "noisy": Noisy,
}


def trained(steps: int, optimizer: Any, run_dir: Path | None = None, **options: Any) -> Any:
    return fit(
        net(), squares, DATA, optimizer=optimizer, batch_size=8, shards=2, workers=2, steps=steps,
        engine="towers", shuffle=False, run_dir=run_dir, summary_every_s=None, **options,
    )  # fmt: skip


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_goes_on_as_if_nothing_had_been_and_does_what_it_does_in_plain_torch(
    name: str, tmp_path: Path
) -> None:
    """Share groups too: a schedule reaches the groups of the wrapped optimizer."""
    make, plain = OPTIMIZERS[name], net()
    scheduled = {"schedule": lambda o: lr_scheduler.StepLR(o, 2, 0.5), "ema_decay": 0.9}
    options = {} if name.startswith("schedulefree") else scheduled
    through = trained(STEPS, make, **options)
    trained(4, make, tmp_path, **options)
    assert digest_of(trained(STEPS, make, tmp_path, **options)) == digest_of(through)
    if name != "noisy":
        plain_loop(plain, make, squares, DATA, steps=STEPS, batch_size=8)
        # Muon's steps have the digits of bfloat16.
        assert_close(trained(STEPS, make).model, plain, 0.02 if name == "muon" else 2e-5)


# --- schedules ------------------------------------------------------------------------------------


class Counting:
    """A factor that depends on the number of calls."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, n: int) -> float:
        self.asked += 1
        return 1.0 / (1 + self.asked)


SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "object": lambda o: lr_scheduler.LambdaLR(o, Counting()),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 4), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 3), lr_scheduler.CosineAnnealingLR(o, 10)], [3]
    ),
}
momentum = partial(SGD, lr=0.05, momentum=0.9)


def rates_and_bits(parts: tuple[int, ...], run_dir: Path, **options: Any) -> tuple[Any, str]:
    """Train up to each number of updates, in trainers of their own."""
    seen: list[float] = []
    rates = Calls(lambda _, report: seen.append(report.lr))
    for steps in parts:
        trainer = trained(steps, run_dir=run_dir, callbacks=[rates], **options)
    return seen, digest_of(trainer)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_that_of_plain_torch_and_goes_on(name: str, tmp_path: Path) -> None:
    options = {"optimizer": momentum, "schedule": SCHEDULES[name]}
    seen, whole = rates_and_bits((STEPS,), tmp_path / "whole", **options)
    assert rates_and_bits((4, STEPS), tmp_path / "parts", **options) == (seen, whole)
    optimizer, expected = momentum([nn.Parameter(torch.ones(1))]), []
    schedule = SCHEDULES[name](optimizer)
    for _ in range(STEPS):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert seen == expected


@pytest.mark.parametrize("metric", ["validation/loss", "loss"])
def test_a_plateau_is_that_of_plain_torch_and_goes_on(metric: str, tmp_path: Path) -> None:
    def plateau(optimizer: Optimizer) -> Any:
        return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)

    validation = quorate.Validation(HELD_OUT, every_steps=2)
    options = {"optimizer": partial(SGD, lr=0.5), "schedule": plateau}
    options |= {"schedule_metric": metric, "validation": validation}
    seen, whole = rates_and_bits((STEPS,), tmp_path / "whole", **options)
    assert rates_and_bits((4, STEPS), tmp_path / "parts", **options) == (seen, whole)
    assert len(set(seen)) > 2
    model, expected, schedules = net(), [0.5], []

    def make(params: Params) -> Optimizer:
        optimizer = SGD(params, lr=0.5)
        schedules.append(plateau(optimizer))
        return optimizer

    def updated(step: int, loss: float) -> None:
        if metric == "loss":
            schedules[0].step(loss)
        elif step % 2 == 0 or step == STEPS:
            schedules[0].step(squares(model, HELD_OUT.tensors).item())
        expected.append(schedules[0].optimizer.param_groups[0]["lr"])

    plain_loop(model, make, squares, DATA, steps=STEPS, batch_size=8, updated=updated)
    assert seen == expected[:-1]


def test_a_rate_that_a_callback_sets_stays_set_and_one_of_the_script_is_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def updated(run: Any, report: quorate.Report) -> None:
        if report.global_step == 3:
            run.param_groups[0].update({"lr": 0.01, "nesterov": True})

    sets = [Calls(updated)]
    through = digest_of(trained(STEPS, momentum, callbacks=sets))
    trained(4, momentum, tmp_path / "set", callbacks=sets)
    assert digest_of(trained(STEPS, momentum, tmp_path / "set", callbacks=sets)) == through
    trained(4, partial(SGD, lr=0.05), tmp_path / "script")
    trainer = trained(5, partial(SGD, lr=0.125), tmp_path / "script")
    assert "lr of parameter group 0 was 0.05 and is 0.125 in the script" in capsys.readouterr().out
    assert trainer.param_groups[0]["lr"] == 0.125


def test_schedule_free_weights_are_evaluated_and_saved(tmp_path: Path) -> None:
    """Gradients at y; x is evaluated and saved; the training does not depend on either."""
    seen: list[dict[str, float]] = []

    make, plain = OPTIMIZERS["schedulefree"], net()
    sees = Calls(evaluated=lambda _, metrics: seen.append(metrics))
    validation = quorate.Validation(HELD_OUT, every_steps=2)
    trainer = trained(6, make, tmp_path, callbacks=[sees], validation=validation)
    assert digest_of(trainer) == digest_of(trained(6, make))
    optimizer: Any = plain_loop(plain, make, squares, DATA, steps=6, batch_size=8)
    optimizer.eval()
    assert seen[-1]["loss"] == pytest.approx(squares(plain, HELD_OUT.tensors).item(), rel=1e-5)
    assert_close(quorate.load_weights(net(), tmp_path), plain, 2e-5)


# --- state that cannot be saved -------------------------------------------------------------------


class OfClass(Own):
    count = 0

    def moved(self, number: int, parameter: Any) -> torch.Tensor:
        OfClass.count += 1
        return parameter.grad / OfClass.count  # type: ignore[no-any-return]


def of_hook(params: Params) -> Optimizer:
    optimizer, seen = SGD(params, lr=0.05), [0]

    def slower(optimizer: Optimizer, _arguments: object, _words: object) -> None:
        seen[0] += 1
        optimizer.param_groups[0]["lr"] = 0.05 / seen[0]

    optimizer.register_step_post_hook(slower)
    return optimizer


class InState(Odd):
    """Has a deque in the state."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for parameter in self.held():
            self.state[parameter]["recent"] = deque([1])


NAMED: dict[str, tuple[Make, str]] = {
    "class": (OfClass, "OfClass.count (class attribute)"),
    "hook": (of_hook, "'seen' in the closure of SGD._optimizer_step_post_hooks"),
}


@pytest.mark.parametrize("name", NAMED)
def test_state_where_nobody_saves_it_is_named(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    OfClass.count = 0
    make, named = NAMED[name]
    trained(3, make, tmp_path)
    assert f"same bits: no, because {named} changes when the optimizer" in capsys.readouterr().out


def test_a_state_that_cannot_be_saved_is_refused_at_once_where_it_is_to_be(tmp_path: Path) -> None:
    with expect_error(CheckpointError, name="optimizer.state_dict().state.0.recent", got="deque"):
        trained(1000, InState, tmp_path)
    trained(3, InState)


class Flattens(Own):
    """Keeps parameters in separate memory: writes there would reach no worker."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self.flat, start = torch.cat([p.detach().reshape(-1) for p in params]), 0
        for p in params:
            p.data = self.flat[start : start + p.numel()].view_as(p)
            start += p.numel()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        gradients = [p.grad.reshape(-1) for p in self.held() if p.grad is not None]
        self.flat.sub_(torch.cat(gradients), alpha=0.05)


def test_optimizers_and_groups_that_cannot_work_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with expect_error(UserError, name="optimizer"):
        trained(3, Flattens)
    trained(3, Late, update="async")
    line = "Late.step() accepts a closure and receives none under async"
    assert line in capsys.readouterr().out
