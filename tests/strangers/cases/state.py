"""State beside parameters and buffers: counters, histories, caches, globals."""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch
import torch.nn.functional as F
from case import REFUSED, SAID, SAME, Case, case, cross_entropy, mlp, vectors
from torch import nn


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


@case
def counter_attribute() -> Case:
    class Counting(Wrapped):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.net(x) * min(1.0, self.calls / 20)

    return Case(Counting(), cross_entropy, vectors(), plain=False, outcomes=(SAID,), names="calls")


@case
def history_list() -> Case:
    class History(Wrapped):
        def __init__(self) -> None:
            super().__init__()
            self.norms: list[float] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.norms.append(float(x.norm()))
            return self.net(x) / max(self.norms)

    return Case(History(), cross_entropy, vectors(), plain=False, outcomes=(SAID,), names="norms")


@case
def running_scale_dict() -> Case:
    class Scaled(Wrapped):
        def __init__(self) -> None:
            super().__init__()
            self.stats = {"scale": 1.0}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.stats["scale"] = 0.9 * self.stats["scale"] + 0.1 * float(x.abs().mean())
            return self.net(x / self.stats["scale"])

    return Case(Scaled(), cross_entropy, vectors(), plain=False, outcomes=(SAID,), names="stats")


@case
def plain_tensor_attribute() -> Case:
    class Memory(Wrapped):
        def __init__(self) -> None:
            super().__init__()
            self.memory = torch.zeros(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.memory = 0.9 * self.memory + 0.1 * x.detach().mean(0)
            return self.net(x - self.memory)

    return Case(Memory(), cross_entropy, vectors(), plain=False, outcomes=(SAID,), names="memory")


@case
def buffer_made_in_forward() -> Case:
    class Late(Wrapped):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not hasattr(self, "mean"):
                self.register_buffer("mean", x.detach().mean(0))
            else:
                self.mean.lerp_(x.detach().mean(0), 0.1)
            return self.net(x - self.mean)

    return Case(
        Late(), cross_entropy, vectors(), plain=False, outcomes=(SAID, REFUSED), names="mean"
    )


@case
def buffer_that_grows() -> Case:
    class Growing(Wrapped):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(0, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = torch.cat([self.seen, x.detach()])[-64:]
            return self.net(x - self.seen.mean(0))

    return Case(
        Growing(), cross_entropy, vectors(), plain=False, outcomes=(SAID, REFUSED), names="seen"
    )


@case
def queue_of_keys() -> Case:
    """MoCo's queue: each shard overwrites a part of a buffer."""

    class Queue(Wrapped):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("queue", torch.randn(16, 3))
            self.register_buffer("at", torch.zeros((), dtype=torch.long))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.net(x)
            at = int(self.at)
            self.queue[at : at + 4] = out.detach()[:4]
            self.at[...] = (at + 4) % 16
            return out + 0.01 * (out @ self.queue.T).mean(1, keepdim=True)

    return Case(Queue(), cross_entropy, vectors(), outcomes=(SAME, SAID))


@case
def extra_state() -> Case:
    class Extra(Wrapped):
        def __init__(self) -> None:
            super().__init__()
            self.age = 0

        def get_extra_state(self) -> Any:
            return {"age": self.age}

        def set_extra_state(self, state: Any) -> None:
            self.age = state["age"]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.age += 1
            return self.net(x) * (1 + 0.01 * self.age)

    return Case(Extra(), cross_entropy, vectors(), plain=False, outcomes=(SAID,), names="age")


@case
def global_counter_in_loss() -> Case:
    counter = itertools.count()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return cross_entropy(model, batch) * (1 + 0.01 * next(counter))

    return Case(mlp(), loss, vectors(), plain=False, outcomes=(SAID,))


@case
def closure_list_in_loss() -> Case:
    seen: list[float] = []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        value = cross_entropy(model, batch)
        seen.append(float(value.detach()))
        return value / max(1.0, len(seen) / 10)

    return Case(mlp(), loss, vectors(), plain=False, outcomes=(SAID,), names="seen")


@case
def clock_in_loss() -> Case:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return cross_entropy(model, batch) * (1 + time.perf_counter() % 1e-3)

    return Case(mlp(), loss, vectors(), plain=False, outcomes=(SAID,))


@case
def own_generator_in_model() -> Case:
    class Noisy(Wrapped):
        def __init__(self) -> None:
            super().__init__()
            self.generator = torch.Generator().manual_seed(5)

        def __deepcopy__(self, memo: Any) -> Noisy:
            copied = Noisy()
            copied.net.load_state_dict(self.net.state_dict())
            return copied

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x + 0.1 * torch.randn(x.shape, generator=self.generator))

    return Case(Noisy(), cross_entropy, vectors(), plain=False, outcomes=(SAID, REFUSED))


@case
def own_numpy_generator_in_loss() -> Case:
    import numpy as np

    generator = np.random.default_rng(0)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return cross_entropy(model, batch) * float(generator.uniform(0.9, 1.1))

    return Case(mlp(), loss, vectors(), plain=False, outcomes=(SAID,))


@case
def dataset_with_own_generator() -> Case:
    class Noisy(torch.utils.data.Dataset[Any]):
        def __init__(self) -> None:
            self.rows = vectors()
            self.generator = torch.Generator().manual_seed(9)

        def __len__(self) -> int:
            return len(self.rows)

        def __getitem__(self, row: int) -> Any:
            x, y = self.rows[row]
            return x + torch.randn(8, generator=self.generator), y

    return Case(mlp(), cross_entropy, Noisy(), plain=False, outcomes=(SAID,))


@case
def dataset_that_counts() -> Case:
    class Curriculum(torch.utils.data.Dataset[Any]):
        def __init__(self) -> None:
            self.rows, self.reads = vectors(), 0

        def __len__(self) -> int:
            return len(self.rows)

        def __getitem__(self, row: int) -> Any:
            self.reads += 1
            x, y = self.rows[row]
            return x * min(1.0, self.reads / 100), y

    return Case(mlp(), cross_entropy, Curriculum(), plain=False, outcomes=(SAID,))


@case
def activation_in_a_global() -> Case:
    """A forward hook leaves an activation where the loss picks it up."""
    model, kept = mlp(), {}
    model[0].register_forward_hook(lambda module, args, out: kept.update(hidden=out))

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        out = model(batch[0])
        return F.cross_entropy(out, batch[1]) + 0.1 * kept["hidden"].square().mean()

    return Case(model, loss, vectors(), outcomes=(SAME, SAID, REFUSED))


@case
def cached_by_first_batch() -> Case:
    """A statistic of the first batch that is kept for good: each worker has seen another one."""

    class FirstBatch(Wrapped):
        mean: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.mean is None:
                self.mean = x.detach().mean(0)
            return self.net(x - self.mean)

    return Case(FirstBatch(), cross_entropy, vectors(), plain=False, outcomes=(SAID,), names="mean")


@case
def last_output_kept_and_unread() -> Case:
    """Keeps its last output for whoever wants to look: nothing depends on it."""

    class Keeps(Wrapped):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last = self.net(x)
            return self.last

    return Case(Keeps(), cross_entropy, vectors(), outcomes=(SAME,))
