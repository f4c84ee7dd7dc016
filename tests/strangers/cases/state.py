"""State beside parameters and buffers: counters, histories, generators, caches, first batches."""

import functools
import random
import time
from typing import Any

import torch
import torch.nn.functional as F
from case import REFUSED, SAID, SAME, Case, Net, case, cross_entropy, forward, loss, mlp, module
from torch import Tensor, nn

# --- attributes -----------------------------------------------------------------------------------


@forward(SAID, "calls (counter_attribute)", state=lambda: {"calls": 0})
def counter_attribute(self: Any, x: Tensor) -> Tensor:
    self.calls += 1
    return self.net(x) * min(1.0, self.calls / 20)


@module("counter_of_the_class", SAID, "OfTheClass.calls (class attribute)")
class OfTheClass(Net):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        OfTheClass.calls += 1
        return self.net(x) / OfTheClass.calls


@module("state_in_a_hook", SAID, "_store (Hooked, state.py:")
class Hooked(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net.register_forward_hook(self._hook)
        self._store = [1.0]

    def _hook(self, _module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        self._store[0] *= 0.9
        return output * self._store[0]


@module("extra_state", SAID, "age")
class Extra(Net):
    age = 0

    def get_extra_state(self) -> Any:
        return {"age": self.age}

    def set_extra_state(self, state: Any) -> None:
        self.age = state["age"]

    def forward(self, x: Tensor) -> Tensor:
        self.age += 1
        return self.net(x) * (1 + 0.01 * self.age)


@forward((SAID, REFUSED), "mean")
def buffer_made_in_forward(self: Any, x: Tensor) -> Tensor:
    if not hasattr(self, "mean"):
        self.register_buffer("mean", x.detach().mean(0))
    else:
        self.mean.lerp_(x.detach().mean(0), 0.1)
    return self.net(x - self.mean)


@forward(SAID, "inner")
def layer_made_in_forward(self: Any, x: Tensor) -> Tensor:
    """Each worker would draw different values."""
    if not hasattr(self, "inner"):
        self.inner = nn.Linear(8, 8)
    return self.net(torch.tanh(self.inner(x)))


# --- state of the loss function -------------------------------------------------------------------


_random = random.Random(4)


@loss(SAID, "'_random' (state.py)")
def own_random_in_a_global(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model, batch) * (1 + _random.random())


@case
def list_in_a_closure() -> Case:
    seen: list[float] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        value = cross_entropy(model, batch)
        seen.append(float(value.detach()))
        return value / max(1.0, len(seen) / 10)

    return Case(SAID, "compute it from at.step", loss=loss)


# --- generators of one's own, clocks --------------------------------------------------------------


def own_generator() -> dict[str, Any]:
    return {"generator": torch.Generator().manual_seed(4)}


@forward(SAID, "generator (own_generator_in_model)", state=own_generator)
def own_generator_in_model(self: Any, x: Tensor) -> Tensor:
    return self.net(x + 0.1 * torch.randn(x.shape, generator=self.generator))


@forward(SAID, "the model (clock_in_model), state.py:")
def clock_in_model(self: Any, x: Tensor) -> Tensor:
    return self.net(x) * (1 + time.perf_counter() % 1)


# --- state left by the first shard: another look at the same rows gives the same ------------------


@forward(SAID, "mean (cached_by_first_batch)", state=lambda: {"mean": None})
def cached_by_first_batch(self: Any, x: Tensor) -> Tensor:
    if self.mean is None:
        self.mean = x.detach().mean(0)
    return self.net(x - self.mean)


@module("weights_cached_by_lru", SAID, "Basis.basis (class attribute) is set")
class Basis(Net):
    """A basis made of the weights once, in a cache of functools on the class."""

    @functools.lru_cache(maxsize=8)  # noqa: B019
    def basis(self) -> Tensor:
        return torch.linalg.qr(self.net[0].weight.detach())[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x + (x @ self.basis().T)[:, :8])


# --- no state: kept values without an effect ------------------------------------------------------


@forward()
def last_output_kept_and_unread(self: Any, x: Tensor) -> Tensor:
    self.last = self.net(x)
    return self.last


@functools.cache
def positions(length: int) -> Tensor:
    return torch.arange(float(length))


@forward(plain=False)
def caches_that_any_shard_fills_alike(self: Any, x: Tensor) -> Tensor:
    """Use a cache of functools, and a buffer made at the first need."""
    if not hasattr(self, "table"):
        self.register_buffer("table", torch.arange(8.0), persistent=False)
    return self.net(x + self.table + positions(8))


class Criterion:
    """Hands the output from method to method, like an experiment written as a class."""

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        self.out = model(batch[0])
        self.total = F.cross_entropy(self.out, batch[1])
        self.penalty()
        return self.total

    def penalty(self) -> None:
        self.total = self.total + 0.1 * self.out.square().mean()


@case
def loss_object_keeps_its_output() -> Case:
    says = "writes to the loss function"
    return Case((SAME, SAID), "Criterion", says=says, model=mlp(2048), loss=Criterion())


@case
def activation_in_a_global() -> Case:
    """A forward hook leaves an activation for the loss to pick up."""
    model, kept = mlp(), {}
    model[0].register_forward_hook(lambda module, args, out: kept.update(hidden=out))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        out = model(batch[0])
        return F.cross_entropy(out, batch[1]) + 0.1 * kept["hidden"].square().mean()

    return Case(SAME, says="'kept' in ", model=model, loss=loss)


count = 0


@loss(SAID, "'count' (state.py)", says="'count' in ")
def counter_in_a_global(model: nn.Module, batch: Any) -> Tensor:
    global count
    count += 1
    return cross_entropy(model, batch)
