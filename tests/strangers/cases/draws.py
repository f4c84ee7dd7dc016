"""Draws: late, seldom, or from generators without a key."""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch
from case import SAID, SAME, Case, case, cross_entropy, forward, loss
from torch import Tensor, nn

loss = partial(loss, plain=False)  # a plain loop draws different numbers
TURNS = "workers compute one at a time"


def late(name: str, draw: Callable[[], Any]) -> None:
    """List a loss scaled by draws, from an update on."""

    def loss(model: nn.Module, batch: Any, at: Any) -> Tensor:
        value = cross_entropy(model, batch)
        return value * (1 + 0.5 * float(draw()) % 1) if at.step >= 4 else value

    says = "" if name == "torch_by_name" else TURNS
    # An unexpected draw is noticed afterwards: the draw has moved the generator of the process.
    outcome = (SAME, "changed") if "hidden" in name else SAME
    case(lambda: Case(outcome, says=says, loss=loss, plain=False), f"late_{name}")


late("python", random.random)
# Not to be seen in the code.
late("python_hidden", lambda: vars(random)["random"]())
late("numpy_hidden", lambda: vars(np.random)["rand"]())
late("python_whole_state", lambda: [random.random() for _ in range(312)][-1])
late("numpy_whole_state", lambda: np.random.randint(0, 2**32, 624, dtype=np.uint32)[-1] / 2**32)
late("torch_by_name", lambda: torch.rand((), generator=torch.default_generator))


@loss()
def written_before_it_turns_out_to_draw(model: nn.Module, batch: Any, at: Any) -> Tensor:
    """The shard has to be computed again, and from the original batch."""
    x, y = batch
    assert (x[:, 0] != 0).all()
    x[:, 0] = 0
    value = cross_entropy(model, (x, y))
    return value * (0.5 + random.random()) if at.step >= 4 else value


@forward((SAME, SAID), plain=False)
def thread_pool_in_forward(self: Any, x: Tensor) -> Tensor:
    with ThreadPoolExecutor(2) as pool:
        noisy = pool.map(lambda part: part + 0.1 * torch.randn(part.shape), x.chunk(2))
        return self.net(torch.cat([*noisy]))


@forward(plain=False)
def seeds_by_hand_in_forward(self: Any, x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return self.net(x + 0.1 * torch.randn(x.shape))
