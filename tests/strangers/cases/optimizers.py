"""Optimizers: those of packages and of one's own, and schedules."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from case import REFUSED, SAID, SAME, Case, case, cross_entropy, mlp, vectors
from torch.optim import lr_scheduler


class Lookahead(torch.optim.Optimizer):
    """Slow weights in an attribute of its own."""

    def __init__(self, params: Any, lr: float = 0.1, k: int = 3) -> None:
        super().__init__(params, {"lr": lr})
        self.k, self.count = k, 0
        self.slow = [[p.detach().clone() for p in g["params"]] for g in self.param_groups]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        for group, slow in zip(self.param_groups, self.slow, strict=True):
            for p, s in zip(group["params"], slow, strict=True):
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"])
                if self.count % self.k == 0:
                    s.lerp_(p, 0.5)
                    p.copy_(s)


@case
def lookahead_in_attributes() -> Case:
    return Case(mlp(), cross_entropy, vectors(), Lookahead, outcomes=(SAME, SAID, REFUSED))


class CountsInGroup(torch.optim.Optimizer):
    """Its step number is in the group, as in many packages."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state.setdefault("m", torch.zeros_like(p)).lerp_(p.grad, 1 / group["k"])
                    p.sub_(state["m"], alpha=group["lr"])


@case
def counter_in_group() -> Case:
    return Case(mlp(), cross_entropy, vectors(), CountsInGroup)


class ListsInState(torch.optim.Optimizer):
    """Keeps the last three gradients of each parameter in a list."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    last = self.state[p].setdefault("last", [])
                    last.append(p.grad.clone())
                    del last[:-3]
                    p.sub_(sum(last), alpha=group["lr"] / 3)


@case
def lists_in_state() -> Case:
    return Case(mlp(), cross_entropy, vectors(), ListsInState, outcomes=(SAME, REFUSED))


@case
def muon_like_matrix_optimizer() -> Case:
    class Orthogonal(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float = 0.02) -> None:
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    g = p.grad
                    if g is None:
                        continue
                    if g.ndim == 2:
                        u, _, v = torch.linalg.svd(g, full_matrices=False)
                        g = u @ v
                    p.sub_(g, alpha=group["lr"])

    # Its gradient has a singular value of rounding alone, which this makes a large one of.
    return Case(mlp(), cross_entropy, vectors(), Orthogonal, plain=False)


@case
def parameter_groups() -> Case:
    def make(params: Any) -> torch.optim.Optimizer:
        decayed = [p for p in params if p.ndim > 1]
        others = [p for p in params if p.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 0.2}]
        return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.0)

    return Case(mlp(), cross_entropy, vectors(), make)


@case
def adafactor() -> Case:
    return Case(mlp(), cross_entropy, vectors(), partial(torch.optim.Adafactor, lr=1e-2))


@case
def one_cycle_with_momentum() -> Case:
    schedule = partial(lr_scheduler.OneCycleLR, max_lr=0.3, total_steps=20)
    return Case(
        mlp(), cross_entropy, vectors(), partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        optimize={"schedule": schedule},
    )  # fmt: skip


@case
def sequential_schedule() -> Case:
    def schedule(opt: Any) -> Any:
        warm = lr_scheduler.LinearLR(opt, 0.1, total_iters=4)
        then = lr_scheduler.CosineAnnealingWarmRestarts(opt, 3)
        return lr_scheduler.SequentialLR(opt, [warm, then], [4])

    return Case(mlp(), cross_entropy, vectors(), optimize={"schedule": schedule})


@case
def lambda_schedule() -> Case:
    schedule = partial(lr_scheduler.LambdaLR, lr_lambda=lambda n: min(1.0, (n + 1) / 6))
    adam = partial(torch.optim.Adam, lr=1e-2)
    return Case(mlp(), cross_entropy, vectors(), adam, optimize={"schedule": schedule})


class OwnSchedule(lr_scheduler.LRScheduler):
    """Depends on what it did before: halves the rate it finds every third time."""

    def get_lr(self) -> list[float]:
        factor = 0.5 if self.last_epoch and self.last_epoch % 3 == 0 else 1.0
        return [group["lr"] * factor for group in self.optimizer.param_groups]


@case
def recursive_schedule() -> Case:
    return Case(mlp(), cross_entropy, vectors(), optimize={"schedule": OwnSchedule})


@case
def learning_rate_in_a_tensor() -> Case:
    make = partial(torch.optim.Adam, lr=torch.tensor(1e-2))
    return Case(mlp(), cross_entropy, vectors(), make)


class SAM(torch.optim.SGD):
    """Sharpness-aware minimisation: needs the gradient at a second point."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "SAM needs a closure"
        held = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in held]).norm()
        moves = [0.05 * p.grad / (norm + 1e-12) for p in held]
        for p, move in zip(held, moves, strict=True):
            p.add_(move)
        with torch.enable_grad():
            closure()
        for p, move in zip(held, moves, strict=True):
            p.sub_(move)
        return super().step()


@case
def sam_needs_a_closure() -> Case:
    make = partial(SAM, lr=0.1)
    return Case(mlp(), cross_entropy, vectors(), make, plain=False)


@case
def lbfgs() -> Case:
    make = partial(torch.optim.LBFGS, lr=0.1)
    return Case(mlp(), cross_entropy, vectors(), make, plain=False)


@case
def learning_rate_set_by_callback() -> Case:
    """Sets the rate by hand, in the optimizer that the script holds on to."""
    from cases.callbacks import After

    held: list[torch.optim.Optimizer] = []

    def make(params: Any) -> torch.optim.Optimizer:
        held.append(torch.optim.SGD(params, lr=0.1, momentum=0.9))
        return held[-1]

    def change(model: Any, _: Any, n: int) -> None:
        for group in held[-1].param_groups:
            group["lr"] = 0.1 / (1 + n // 3)

    return Case(mlp(), cross_entropy, vectors(), make, callbacks=[After(change)], after=change)
