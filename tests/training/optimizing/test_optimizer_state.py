"""What optimizers and schedules keep outlives a resume: as without one, to the bit."""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import prodigyopt
import pytest
import schedulefree
import torch
from support.messages import expect_error
from torch import nn
from torch.optim import Optimizer, lr_scheduler
from torch.utils.data import TensorDataset

import quorate
from quorate.errors import CheckpointError, SettingError, UserError

STEPS = 11
X = torch.randn(24, 5, generator=torch.Generator().manual_seed(0))
Y = torch.randn(24, 1, generator=torch.Generator().manual_seed(1))
Make = Callable[[list[nn.Parameter]], Optimizer]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 8)
        self.last = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


class Lookahead(Optimizer):
    """Wraps another, and has its slow weights in an attribute, by parameter."""

    def __init__(self, base: Optimizer, k: int = 3) -> None:
        self.base, self.k, self.count = base, k, 0
        super().__init__(base.param_groups[0]["params"], {"lr": base.param_groups[0]["lr"]})
        self.param_groups = base.param_groups
        self.slow = {p: p.detach().clone() for g in self.param_groups for p in g["params"]}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.base.step()
        self.count += 1
        if self.count % self.k == 0:
            for parameter, slow in self.slow.items():
                slow.lerp_(parameter, 0.5)
                parameter.copy_(slow)


class Odd(Optimizer):
    """Keeps all kinds of values, and steps by each of them."""

    def __init__(self, params: list[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr, "k": 0, "span": (0.5, None), "sum": 0.0})
        self.history: list[float] = []
        self.nested = defaultdict(dict)
        self.total = torch.zeros((), dtype=torch.float64)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        group = self.param_groups[0]
        group["k"] += 1
        group["sum"] += 1 / group["k"]
        self.history = [*self.history[-2:], group["sum"]]
        self.total += 0.125
        for number, parameter in enumerate(group["params"]):
            state = self.state[parameter]
            if not state:
                state["past"] = []
                state["double"] = torch.zeros_like(parameter, dtype=torch.float64)
                state["turned"] = torch.empty_strided(
                    parameter.shape, [1, len(parameter)][: parameter.ndim]
                )
                state["mode"] = "slow"
                state["pair"] = (1, torch.ones(2))
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
            parameter.sub_(group["lr"] * 0.01 * speed * (mean + state["double"].float()))


OPTIMIZERS: dict[str, Make] = {
    "schedulefree": lambda p: schedulefree.AdamWScheduleFree(p, lr=0.05, warmup_steps=3),
    "schedulefree sgd": lambda p: schedulefree.SGDScheduleFree(p, lr=0.05),
    "prodigy": lambda p: prodigyopt.Prodigy(p, lr=1.0, safeguard_warmup=True),
    "lookahead": lambda p: Lookahead(torch.optim.Adam(p, lr=0.05)),
    "odd": lambda p: Odd(p, lr=0.05),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
    "adam": lambda p: torch.optim.Adam(p, lr=0.05),
    "adam, tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.05), fused=False),
}

SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "step": lambda o: lr_scheduler.StepLR(o, 3, 0.5),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda n: 1 / (n + 1)),
    "object": lambda o: lr_scheduler.LambdaLR(o, Counting()),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda n: 0.9),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 4), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 3), lr_scheduler.CosineAnnealingLR(o, 10)], [3]
    ),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4, 2),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 3, mode="exp_range", gamma=0.9),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, 20),
}


class Counting:
    """A factor that depends on how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, n: int) -> float:
        self.asked += 1
        return 1.0 / (1 + self.asked)


def trained(
    steps: int, optimize: Any, run_dir: Path | None = None, callbacks: Any = (), **fit: Any
) -> quorate.Trainer:
    trainer = quorate.Trainer(
        Net(),
        loss,
        optimizer=optimize,
        batch_size=8,
        shards=2,
        devices="cpu",
        workers=quorate.Workers(2, engine="towers"),
        run_dir=None if run_dir is None else quorate.RunDir(run_dir, summary_every_s=None),
    )
    trainer.fit(TensorDataset(X, Y), steps=steps, shuffle=False, callbacks=callbacks, **fit)
    return trainer


def values(trainer: quorate.Trainer) -> list[torch.Tensor]:
    return [p.detach().clone() for p in trainer.model.parameters()]


def assert_equal(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other), float((one - other).abs().max())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_goes_on_as_if_nothing_had_been(name: str, tmp_path: Path) -> None:
    through = values(trained(STEPS, OPTIMIZERS[name]))
    trained(4, OPTIMIZERS[name], tmp_path)
    trained(5, OPTIMIZERS[name], tmp_path)
    assert_equal(values(trained(STEPS, OPTIMIZERS[name], tmp_path)), through)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_does_what_it_does_in_plain_torch(name: str) -> None:
    model = Net()
    optimizer: Any = OPTIMIZERS[name](list(model.parameters()))
    if hasattr(optimizer, "train"):
        optimizer.train()
    for step in range(STEPS):
        rows = [(step * 8 + n) % 24 for n in range(8)]
        optimizer.zero_grad()
        loss(model, [X[rows], Y[rows]]).backward()
        optimizer.step()
    got = values(trained(STEPS, OPTIMIZERS[name]))
    for one, other in zip(got, model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_goes_on_as_if_nothing_had_been(name: str, tmp_path: Path) -> None:
    def optimize() -> quorate.Optimize:
        return quorate.Optimize(
            lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), schedule=SCHEDULES[name]
        )

    lrs: list[float] = []

    class Lrs(quorate.Callback):
        def updated(self, report: Any) -> None:
            lrs.append(report.lr)

    through = values(trained(STEPS, optimize(), callbacks=[Lrs()]))
    expected, lrs = lrs, []
    trained(4, optimize(), tmp_path, callbacks=[Lrs()])
    got = values(trained(STEPS, optimize(), tmp_path, callbacks=[Lrs()]))
    assert lrs == expected
    assert_equal(got, through)


def test_a_learning_rate_that_a_callback_sets_stays_set(tmp_path: Path) -> None:
    made: list[Optimizer] = []

    def sgd(parameters: list[nn.Parameter]) -> Optimizer:
        made.append(torch.optim.SGD(parameters, lr=0.05, momentum=0.9))
        return made[-1]

    class Sets(quorate.Callback):
        def updated(self, report: Any) -> None:
            if report.global_step == 3:
                made[-1].param_groups[0]["lr"] = 0.01
                made[-1].param_groups[0]["nesterov"] = True

    through = values(trained(STEPS, sgd, callbacks=[Sets()]))
    trained(4, sgd, tmp_path, callbacks=[Sets()])
    assert_equal(values(trained(STEPS, sgd, tmp_path, callbacks=[Sets()])), through)


def test_a_learning_rate_that_the_script_has_otherwise_now_is_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(4, lambda p: torch.optim.SGD(p, lr=0.05), tmp_path)
    trainer = trained(5, lambda p: torch.optim.SGD(p, lr=0.125), tmp_path)
    assert "lr of parameter group 0 was 0.05 and is 0.125 in the script" in capsys.readouterr().out
    state = trainer._prepared.state
    assert state is not None
    assert state.optimizer.lr == 0.125


@pytest.mark.parametrize("metric", ["validation/loss", "loss"])
def test_a_plateau(metric: str, tmp_path: Path) -> None:
    """Against a loop of plain torch, and through a resume."""

    def optimize() -> quorate.Optimize:
        return quorate.Optimize(
            lambda p: torch.optim.SGD(p, lr=0.5),
            schedule=lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0),
            schedule_metric=metric,
        )

    lrs: list[float] = []

    class Lrs(quorate.Callback):
        def updated(self, report: Any) -> None:
            lrs.append(report.lr)

    held_out = TensorDataset(X[:6], Y[:6])
    validation = quorate.Validation(held_out, every_steps=2)
    through = values(trained(STEPS, optimize(), callbacks=[Lrs()], validation=validation))
    expected, lrs = lrs, []
    trained(4, optimize(), tmp_path, callbacks=[Lrs()], validation=validation)
    got = values(trained(STEPS, optimize(), tmp_path, callbacks=[Lrs()], validation=validation))
    assert lrs == expected
    assert len(set(lrs)) > 2
    assert_equal(got, through)

    model, plain = Net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    for step in range(STEPS):
        rows = [(step * 8 + n) % 24 for n in range(8)]
        optimizer.zero_grad()
        value = loss(model, [X[rows], Y[rows]])
        value.backward()
        plain.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if metric == "loss":
            schedule.step(value.item())
        elif step % 2 == 1 or step == STEPS - 1:
            schedule.step(loss(model, [X[:6], Y[:6]]).item())
    assert plain == lrs


def test_schedule_free_weights_are_evaluated_and_saved(tmp_path: Path) -> None:
    """Gradients at y; x is evaluated and saved; the training does not depend on either."""
    make = OPTIMIZERS["schedulefree"]
    held_out = TensorDataset(X[:6], Y[:6])
    seen: list[dict[str, float]] = []

    class Sees(quorate.Callback):
        def evaluated(self, global_step: int, metrics: dict[str, float]) -> None:
            seen.append(metrics)

    trainer = trained(
        6,
        make,
        tmp_path,
        callbacks=[Sees()],
        validation=quorate.Validation(held_out, every_steps=2),
    )
    assert_equal(values(trainer), values(trained(6, make)))
    state = trainer._prepared.state
    assert state is not None
    state.optimizer.inner.eval()
    x = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    assert seen[-1]["loss"] == pytest.approx(loss(trainer.model, [X[:6], Y[:6]]).item(), rel=1e-6)
    saved = quorate.load_weights(Net(), tmp_path).state_dict()
    for name, value in x.items():
        assert torch.equal(saved[name], value)


class Deque(Odd):
    """Has one in an attribute."""

    def __init__(self, params: list[nn.Parameter], lr: float) -> None:
        super().__init__(params, lr)
        self.recent: deque[int] = deque(maxlen=2)

    def step(self, closure: Any = None) -> None:
        super().step()
        self.recent.append(len(self.history))


class InState(Odd):
    """Has one in its state."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["recent"] = deque([1])


def test_what_cannot_be_saved_is_said_or_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(3, lambda p: Deque(p, lr=0.05), tmp_path / "said")
    assert "because Deque.recent, a deque, changes when the optimizer" in capsys.readouterr().out
    with expect_error(CheckpointError, name="optimizer.state_dict().state.0.recent", got="deque"):
        trained(1000, lambda p: InState(p, lr=0.05), tmp_path / "refused")
    trained(3, lambda p: InState(p, lr=0.05))  # nothing is to be saved


def test_optimizers_and_groups_that_cannot_work_are_refused() -> None:
    with expect_error(SettingError, name="schedule_metric"):
        trained(3, quorate.Optimize(OPTIMIZERS["adam"], schedule=lr_scheduler.ReduceLROnPlateau))
    plateau = quorate.Optimize(
        OPTIMIZERS["adam"],
        schedule=lr_scheduler.ReduceLROnPlateau,
        schedule_metric="validation/loss",
    )
    with expect_error(SettingError, name="schedule_metric"):
        trained(3, plateau)
    made: list[Optimizer] = []

    class Adds(quorate.Callback):
        def updated(self, report: Any) -> None:
            made[-1].add_param_group({"params": [nn.Parameter(torch.zeros(1))]})

    def sgd(parameters: list[nn.Parameter]) -> Optimizer:
        made.append(torch.optim.SGD(parameters, lr=0.05))
        return made[-1]

    with expect_error(UserError, name="optimizer", got="2 groups"):
        trained(3, sgd, callbacks=[Adds()])


def test_a_checkpoint_of_before_steps_through_the_schedule(tmp_path: Path) -> None:
    """One without groups and schedule in its record is resumed as it was then."""
    from quorate.services.checkpoints import files
    from quorate.services.checkpoints.draft import Contents, write
    from quorate.services.checkpoints.files import tensors

    optimize = quorate.Optimize(
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), schedule=SCHEDULES["one cycle"]
    )
    through = values(trained(STEPS, optimize))
    trained(4, optimize, tmp_path)
    newest = files.find(tmp_path)
    assert newest is not None
    record = {
        name: entry
        for name, entry in newest.record.items()
        if not name.startswith(("optimizer_", "schedule_", "amendments", "hyper", "files"))
        or name == "optimizer_numbers"
    }
    names = [name for name in newest.record["files"] if name != "rest.safetensors"]
    write(tmp_path, Contents({n: tensors(newest.path, n) for n in names}, record))
    assert "optimizer_groups" not in json.loads((newest.path / "state.json").read_text())
    assert_equal(values(trained(STEPS, optimize, tmp_path)), through)
