"""Models and loss functions that hold on to things, each beside a loop of plain torch.

Run with the name of one, it prints a line of JSON: the digest, how far the parameters are from
those of the plain loop, and the notes.
"""

from __future__ import annotations

import functools
import json
import logging
import random
import sys
import types
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import torch.nn.utils.prune
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import TensorDataset

import quorate
from quorate.replica.digest import digest

STEPS, BATCH, SHARDS, RATE = 4, 12, 3, 0.1
DATA = TensorDataset(
    torch.randn(24, 6, generator=torch.Generator().manual_seed(0)),
    torch.randn(24, 1, generator=torch.Generator().manual_seed(1)),
)


class Net(nn.Module):
    """Two layers."""

    scale = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.last = nn.Linear(8, 1)
        self.kept: dict[str, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


def mse(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


torch.manual_seed(0)
net: nn.Module = Net()
acts: dict[str, torch.Tensor] = {}
count = 0


# --- classes of mischief -------------------------------------------------------------------------


def l2_of_a_global() -> Any:
    return (
        net,
        lambda model, batch: (
            mse(model, batch) + 0.1 * sum(p.square().sum() for p in net.parameters())
        ),
    )


def penalty() -> torch.Tensor:
    return net.get_parameter("first.weight").abs().sum()


def l1_by_a_function() -> Any:
    return net, lambda model, batch: mse(model, batch) + 0.01 * penalty()


class Ridge:
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return mse(model, batch) + 0.1 * sum(p.square().sum() for p in self.model.parameters())


def loss_that_is_an_object() -> Any:
    return net, Ridge(net)


def loss_that_is_a_partial() -> Any:
    def loss(model: nn.Module, batch: Any, other: nn.Module) -> torch.Tensor:
        return mse(model, batch) + 0.1 * other.get_parameter("last.weight").square().sum()

    return net, functools.partial(loss, other=net)


def lambda_in_an_attribute() -> Any:
    model: Any = Net()
    model.gate = lambda x: torch.sigmoid(model.first(x))
    model.forward = types.MethodType(
        lambda self, x: self.last(torch.tanh(self.first(x)) * self.gate(x)), model
    )
    return model, mse


def patched_forward() -> Any:
    model: Any = Net()
    plain = model.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        return plain(x) + model.last.bias

    model.forward = forward
    return model, mse


def hook_with_the_model() -> Any:
    model: Any = Net()
    model.first.register_forward_hook(lambda _m, _i, out: out * model.last.weight.abs().mean())
    return model, mse


def weak_reference() -> Any:
    model: Any = Net()
    model.last.__dict__["above"] = weakref.ref(model)
    model.last.register_forward_hook(lambda m, _i, out: out + m.above().first.bias.sum())
    return model, mse


def hook_that_keeps_in_the_model() -> Any:
    model: Any = Net()

    def keep(_m: nn.Module, _i: Any, out: torch.Tensor) -> None:
        model.kept["first"] = out

    model.first.register_forward_hook(keep)
    return model, lambda model, batch: mse(model, batch) + model.kept["first"].square().mean()


# Towers can do these.


def method_bound_anew() -> Any:
    model: Any = Net()
    model.forward = types.MethodType(lambda self, x: self.last(self.first(x)), model)
    return model, mse


def partial_of_a_method() -> Any:
    model: Any = Net()
    model.forward = functools.partial(model.forward)
    return model, mse


def weight_norm() -> Any:
    model = Net()
    torch.nn.utils.weight_norm(model.first)
    return model, mse


def pruned() -> Any:
    model = Net()
    torch.nn.utils.prune.l1_unstructured(model.first, "weight", 0.5)
    return model, mse


def kept_from_before() -> Any:
    model = Net()
    model.kept["out"] = model(torch.ones(2, 6))
    return model, mse


def scripted() -> Any:
    return torch.jit.script(Net()), mse


def traced() -> Any:
    return torch.jit.trace(Net(), torch.ones(2, 6)), mse


def hook_that_keeps_in_a_global() -> Any:
    model = Net()

    def keep(_m: nn.Module, _i: Any, out: torch.Tensor) -> None:
        acts["first"] = out

    model.first.register_forward_hook(keep)
    return model, lambda model, batch: mse(model, batch) + acts["first"].square().mean()


class Keeps:
    """Hands its output from one method to the next in an attribute."""

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.out = model(batch[0])
        return F.mse_loss(self.out, batch[1]) + self.penalty()

    def penalty(self) -> torch.Tensor:
        return 0.1 * self.out.square().mean()


def object_that_keeps_its_output() -> Any:
    return Net(), Keeps()


def method_that_keeps_its_output() -> Any:
    return Net(), Keeps().__call__


class Criterion(nn.Module):
    """Likewise, as a module outside of the model."""

    def forward(self, out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.residual = out - target
        return self.residual.square().mean()


def module_that_keeps_its_input() -> Any:
    criterion = Criterion()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        value = criterion(model(batch[0]), batch[1])
        return value + criterion.residual.abs().mean()

    return Net(), loss


def counter_in_a_global() -> Any:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        global count
        count += 1
        return mse(model, batch)

    return Net(), loss


# A switch of the process, set for a while.


def default_dtype() -> Any:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        torch.set_default_dtype(torch.float64)
        try:
            noise = sum(torch.full((3,), 0.1).sum() for _ in range(50)) / 15
        finally:
            torch.set_default_dtype(torch.float32)
        return mse(model, batch) * noise.float()

    return Net(), loss


def default_dtype_that_stays() -> Any:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        noise = torch.full((3,), 0.1).sum()
        vars(torch)["set_default_dtype"](torch.float64)  # not to be seen in the code
        return mse(model, batch) * noise.float()

    return Net(), loss


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).view(1, 1, -1, 8)
        with sdpa_kernel([SDPBackend.MATH]):
            return F.scaled_dot_product_attention(h, h, h).view(-1, 8).mean(1, keepdim=True)


def attention_kernel() -> Any:
    return Attention(), mse


def onednn_off() -> Any:
    class Off(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.backends.mkldnn.flags(enabled=False):
                return super().forward(x)

    return Off(), mse


# Draws. The plain loop does not know the keys, so these have no values to compare with.


class Late(Net):
    """Drops a layer at random, after a warm-up of so many calls."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        h = torch.tanh(self.first(x))
        if self.calls.item() > 2 and self.draw() < 0.5:
            h = h * 0.5
        return self.last(h)


def late_python() -> Any:
    return Late(random.random), mse


def late_numpy() -> Any:
    return Late(lambda: float(np.random.randn())), mse


def default_generator() -> Any:
    return Late(lambda: float(torch.rand((), generator=torch.default_generator))), mse


def thread_pool() -> Any:
    def draw() -> float:
        with ThreadPoolExecutor(1) as pool:
            return float(pool.submit(torch.rand, ()).result())

    return Late(draw), mse


CASES: dict[str, Callable[[], Any]] = {
    name: value
    for name, value in list(globals().items())
    if isinstance(value, types.FunctionType)
    and value.__module__ == "__main__"
    and name not in ("mse", "penalty", "main", "plain_loop")
}


def plain_loop(model: nn.Module, loss: Any) -> nn.Module:
    """Train by hand: per step the mean of the shards' gradients."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    for step in range(STEPS):
        first = step * BATCH % len(DATA)
        sums = [torch.zeros_like(p) for p in parameters]
        size = BATCH // SHARDS
        for shard in range(SHARDS):
            rows = slice(first + shard * size, first + (shard + 1) * size)
            value = loss(model, [tensor[rows] for tensor in DATA.tensors])
            grads = torch.autograd.grad(value, parameters)
            torch.set_default_dtype(torch.float32)
            for total, grad in zip(sums, grads, strict=True):
                total += grad / SHARDS
        with torch.no_grad():
            for parameter, total in zip(parameters, sums, strict=True):
                parameter -= RATE * total
    return model


def main() -> None:
    name = sys.argv[1]
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("quorate").addHandler(handler)
    global net
    torch.manual_seed(0)
    net = Net()
    model, loss = CASES[name]()
    trainer = quorate.Trainer(
        model,
        loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=RATE),
        batch_size=BATCH,
        shards=SHARDS,
    )
    for _ in trainer.updates(DATA, steps=STEPS, shuffle=False):
        pass
    trained = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    torch.manual_seed(0)
    net = Net()
    by_hand, loss = CASES[name]()
    plain_loop(by_hand, loss)
    off = max(float((trained[n] - p).abs().max()) for n, p in by_hand.named_parameters())
    sums = digest(trainer.model.state_dict().items())
    engine = "processes" if "workers are processes" in " ".join(said) else ""
    print(json.dumps({"digest": sums, "off": off, "said": said, "engine": engine}))


if __name__ == "__main__":
    main()
