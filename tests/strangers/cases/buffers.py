"""Buffers: averages, counters, statistics kept as they are, modes; teachers written by forward.

Frozen parameters written by forward are carried as buffers are.
"""

from typing import Any

import torch
from case import REFUSED, SAID, SAME, Net, forward, mlp, module, pairs
from torch import Tensor, nn


@module("state_dict_that_leaves_a_layer_out", (SAME, SAID, REFUSED))
class Partly(Net):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        full = super().state_dict(*args, **kwargs)
        return type(full)((k, v) for k, v in full.items() if not k.startswith("net.2"))


@forward((SAID, REFUSED), "seen", state=lambda: {"seen": torch.zeros(0, 8)})
def buffer_that_grows(self: Any, x: Tensor) -> Tensor:
    self.seen = torch.cat([self.seen, x.detach()])[-64:]
    return self.net(x - self.seen.mean(0))


@forward(REFUSED, "seen", state=lambda: {"seen": torch.tensor(0)})
def integer_buffer_becomes_float(self: Any, x: Tensor) -> Tensor:
    self.seen = self.seen * 0.9 + len(x)
    return self.net(x) * (1 - 1 / (1 + self.seen))


@forward((SAME, SAID), state=lambda: {"queue": torch.randn(16, 3), "at": torch.tensor(0)})
def queue_of_keys(self: Any, x: Tensor) -> Tensor:
    """MoCo's queue: each shard overwrites a part of a buffer."""
    out, at = self.net(x), int(self.at)
    self.queue[at : at + 4] = out.detach()[:4]
    self.at[...] = (at + 4) % 16
    return out + 0.01 * (out @ self.queue.T).mean(1, keepdim=True)


@module("ema_teacher_in_forward", plain=False)
class Teaching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = mlp(), mlp()
        self.teacher.requires_grad_(False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
            self.follow()
        return self.student(x) + 0.5 * self.teacher(x)

    def follow(self) -> None:
        for s, t in pairs(self.student, self.teacher):
            t.data = t.data * 0.9 + s.data * 0.1


@module(
    "teacher_follows_every_fourth_step", SAID, "forward writes teacher.0.weight (Linear), teach"
)
class Fourth(Teaching):
    """Writes in place, and not in the first steps."""

    def follow(self) -> None:
        if int(self.steps) % 4 == 0:
            for s, t in pairs(self.student, self.teacher):
                t.data.mul_(0.5).add_(s.data, alpha=0.5)
