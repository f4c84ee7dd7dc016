"""Optimizers: those of packages and of one's own, and schedules."""

from functools import partial
from typing import Any

import torch
from case import REFUSED, SAID, SAME, Case, case
from torch import Tensor
from torch.optim import lr_scheduler


class Own(torch.optim.Optimizer):
    """Steps by ``move``, for each parameter with a gradient."""

    def __init__(self, params: Any, lr: float = 0.1, **more: Any) -> None:
        super().__init__(params, {"lr": lr, "k": 0, **more})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(self.move(p, group), alpha=group["lr"])

    def move(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        """Average gradients; the step number is in the group, as in many packages."""
        return self.state[p].setdefault("m", torch.zeros_like(p)).lerp_(p.grad, 1 / group["k"])


class ListsInState(Own):
    """Keeps the last three gradients of each parameter in a list."""

    def move(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        last = self.state[p].setdefault("last", [])
        last.append(p.grad.clone())
        del last[:-3]
        return sum(last) / 3


class Langevin(Own):
    """Steps by the gradient and noise."""

    def move(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        return p.grad + 0.2 * torch.randn_like(p)


class Lookahead(torch.optim.Optimizer):
    """Has slow weights in an attribute."""

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


def optimizer(name: str, make: Any, outcome: Any = SAME, **more: Any) -> None:
    """List an optimizer."""
    case(lambda: Case(outcome, optimizer=make, **more), name)


optimizer("counter_in_group", Own)
optimizer("lists_in_state", ListsInState, (SAME, REFUSED))
optimizer("langevin", partial(Langevin, lr=0.05), plain=False)
optimizer("lookahead_in_attributes", Lookahead, (SAME, SAID, REFUSED))
optimizer("adafactor", partial(torch.optim.Adafactor, lr=1e-2))
optimizer("learning_rate_in_a_tensor", partial(torch.optim.Adam, lr=torch.tensor(1e-2)))

# --- schedules ------------------------------------------------------------------------------------


def sequential(opt: Any) -> Any:
    warm = lr_scheduler.LinearLR(opt, 0.1, total_iters=4)
    then = lr_scheduler.CosineAnnealingWarmRestarts(opt, 3)
    return lr_scheduler.SequentialLR(opt, [warm, then], [4])


def schedule(name: str, schedule: Any) -> None:
    """List a schedule."""
    momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    optimizer(name, momentum, optimize={"schedule": schedule})


schedule("sequential_schedule", sequential)
schedule("lambda_schedule", partial(lr_scheduler.LambdaLR, lr_lambda=lambda n: min(1, (n + 1) / 6)))
