"""Optimizers of one's own; more of them, and schedules: ``training/test_optimizer_state.py``."""

from typing import Any

import torch
from case import REFUSED, SAME, Case, case
from torch import Tensor


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


case(lambda: Case(optimizer=Own), "counter_in_group")
case(lambda: Case((SAME, REFUSED), optimizer=ListsInState), "lists_in_state")
