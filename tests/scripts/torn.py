"""A long vector of equal numbers: a reader during a write sees two different numbers.

    quorate run --devices cpu --workers 3 --shards 6 --update async tests/scripts/torn.py 300

Argument: the least number of updates; the run goes on until a shard was stale, for the first worker
may be alone for a while. Every gradient and every update keeps all elements equal. A shard looks at
them at the beginning, and again in its backward pass. The metrics have the read values; the
coordinator compares the values with the result of a single update. Prints a line of JSON.
"""

import json
import sys
from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import quorate

STEPS, SIZE = int(sys.argv[1]), 2_000_000


def even(values: torch.Tensor) -> torch.Tensor:
    """Return a copy of the value common to all elements."""
    least, most = values.detach().aminmax()
    if not torch.equal(least, most):
        raise AssertionError(f"torn: from {least.item()!r} to {most.item()!r}")
    return least


class Even(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.ones(SIZE))


def loss(model: Any, batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    value = even(model.value)

    def look_again(_: torch.Tensor) -> None:
        if not torch.equal(even(model.value), value):
            raise AssertionError(f"{value.item()!r} became {model.value[0].item()!r}")

    mean = model.value.mean()
    mean.register_hook(look_again)
    return {"loss": (mean * batch[0]).mean(), "value": value}


trainer: Any = quorate.Trainer(
    Even, loss, optimizer=lambda params: torch.optim.SGD(params, lr=0.01 * SIZE), batch_size=6
)
states, staleness = [1.0], Counter[int]()
x = torch.linspace(-1.0, 1.0, 60)
for update in trainer.updates(TensorDataset(x), steps=20 * STEPS):
    read = update.metrics["value"]
    if read != states[update.global_step - 1 - update.staleness]:
        raise AssertionError(f"{read} was no state: {update}, {states[-20:]}")
    staleness[update.staleness] += 1
    states.append(even(trainer.model.value).item())
    if update.global_step >= STEPS and max(staleness) > 0:
        break
print(json.dumps({"updates": len(states) - 1, "staleness": sorted(staleness.items())}))
