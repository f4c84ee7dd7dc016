"""Updates in parts: the bits of one process, whoever is killed, and nothing of the state here."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
import torch
from support.messages import expect_error
from torch import nn

from quorate.errors import ServerError
from quorate.replica.flat import Flat, Layout
from quorate.replica.model import bind, trainable
from quorate.training.optimizing.known_optimizers import ELEMENTWISE
from quorate.training.optimizing.optimizer import FlatOptimizer
from quorate.training.parts.parted_optimizer import PartedOptimizer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="parts are for Linux")

Factory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
PARTS = 2


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(40, 300), nn.Linear(300, 30), nn.Linear(30, 5).double())


class Run:
    """An optimizer over a model's parameters, and its updates."""

    def __init__(self, factory: Factory, parts: int) -> None:
        made = model()
        self.parameters = Layout(trainable(made).items()).shared()
        for name, parameter in trainable(made).items():
            self.parameters.views[name].copy_(parameter.detach())
        bind(trainable(made), self.parameters)
        self.gradient = self.parameters.layout.shared()
        self.optimizer = (
            FlatOptimizer(factory, made, self.parameters)
            if parts == 1
            else PartedOptimizer(factory, made, self.parameters, parts)
        )

    def update(self, n: int, missing: tuple[str, ...] = ()) -> None:
        filled(self.gradient, n)
        for group in self.optimizer.param_groups:
            group["lr"] = 0.01 * n
        with torch.no_grad():
            self.optimizer.step(self.gradient, missing)

    def all(self) -> dict[str, Any]:
        found: dict[str, Any] = dict(self.parameters.views)
        for name, entries in self.optimizer.state().items():
            found |= {f"{name} {entry}": value for entry, value in entries.items()}
        return found


def filled(gradient: Flat, n: int) -> None:
    for name, view in gradient.views.items():
        torch.manual_seed(n)
        view.copy_(torch.randn(view.shape) * len(name))


def require_same(one: Run, other: Run) -> None:
    mine, theirs = one.all(), other.all()
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == theirs[name].dtype, name
            assert torch.equal(value, theirs[name]), name
        else:
            assert value == theirs[name], name


@contextmanager
def pair(factory: Factory) -> Iterator[tuple[Run, Run]]:
    whole, parted = Run(factory, 1), Run(factory, PARTS)
    try:
        yield whole, parted
    finally:
        parted.optimizer.close()
        assert not parts_alive()


def parts_alive() -> list[Any]:
    return [p for p in active_children() if p.name.startswith("quorate-part")]


KINDS: list[Factory] = [
    *(partial(kind, lr=0.01) for kind in sorted(ELEMENTWISE, key=lambda kind: kind.__name__)),
    partial(torch.optim.Adam, amsgrad=True, weight_decay=0.1),
    partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    partial(torch.optim.RMSprop, momentum=0.9, centered=True),
]
QUICK = ("AdamW", "SGD")


@pytest.mark.parametrize(
    "factory",
    [
        pytest.param(
            each,
            id=f"{each.func.__name__}-{number}",  # type: ignore[attr-defined]
            marks=[] if each.func.__name__ in QUICK else pytest.mark.slow,  # type: ignore[attr-defined]
        )
        for number, each in enumerate(KINDS)
    ],
)
def test_the_bits_of_one_process(factory: Factory) -> None:
    with pair(factory) as (whole, parted):
        for n, missing in enumerate([(), ("1.bias",), (), ("0.weight", "2.bias")], start=1):
            whole.update(n, missing)
            parted.update(n, missing)
        assert len(parts_alive()) == PARTS
        require_same(whole, parted)
        # The state of the one is loaded into the other, and both go on.
        parted.optimizer.load(parted.optimizer.loadable(whole.optimizer.state()))
        for run in (whole, parted):
            run.update(5)
        require_same(whole, parted)


def test_groups_and_what_user_code_writes() -> None:
    def factory(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adam([{"params": params[:3]}, {"params": params[3:], "lr": 0.5}])

    with pair(factory) as (whole, parted):
        for run in (whole, parted):
            run.update(1)
            for entries in run.optimizer.inner.state.values():
                entries["exp_avg"].mul_(0.5)
                entries["exp_avg_sq"] = entries["exp_avg_sq"] * 2
                entries["step"] += 3
            run.optimizer.param_groups[1]["betas"] = (0.5, 0.6)
            run.update(2)
        require_same(whole, parted)


def test_a_part_that_is_killed_between_updates() -> None:
    with pair(torch.optim.AdamW) as (whole, parted):
        for n in range(1, 4):
            whole.update(n)
            parted.update(n)
            process = parts_alive()[n % PARTS]
            os.kill(process.pid, signal.SIGKILL)
            process.join()
        require_same(whole, parted)


def test_a_part_that_is_killed_in_an_update_ends_the_run() -> None:
    parent = os.getpid()

    def factory(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params)

    run = Run(factory, PARTS)
    try:
        run.update(1)
        inner = run.optimizer.inner
        kept = inner.step

        def step(*args: Any) -> Any:
            if os.getpid() != parent:
                os.kill(os.getpid(), signal.SIGKILL)
            return kept(*args)

        run.optimizer.close()
        inner.step = step  # type: ignore[method-assign]
        with expect_error(ServerError, hide=r"(?<=part )\d+"):
            run.update(2)
        assert not parts_alive()
    finally:
        run.optimizer.close()


def test_one_that_looks_at_shapes_is_not_parted() -> None:
    whole, parted = Run(torch.optim.Adafactor, 1), Run(torch.optim.Adafactor, PARTS)
    for run in (whole, parted):
        run.update(1)
    require_same(whole, parted)
    assert not parts_alive()


@pytest.mark.slow
def test_state_is_in_the_pages_of_the_parts() -> None:
    def large() -> nn.Module:
        return nn.Sequential(nn.Linear(2000, 1000), nn.Linear(1000, 2000))

    made = large()
    parameters = Layout(trainable(made).items()).shared()
    bind(trainable(made), parameters)
    gradient = parameters.layout.shared()
    optimizer = PartedOptimizer(torch.optim.AdamW, made, parameters, PARTS)
    state_kib = 2 * parameters.layout.nbytes // 1024
    try:
        before = shared_kib(os.getpid())
        for _ in range(2):
            optimizer.step(gradient)
        assert shared_kib(os.getpid()) - before < state_kib / 8
        for process in parts_alive():
            # Half of the state, of the parameters and of the gradient.
            assert state_kib * 0.45 < shared_kib(process.pid) < state_kib * 1.3
    finally:
        optimizer.close()


def shared_kib(pid: int) -> int:
    """Memory without a name that a process has touched."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssShmem:"))
