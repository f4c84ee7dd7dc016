"""Models whose copy is not a copy: something in them, or in the loss, holds the original."""

import threading
import weakref
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from case import REFUSED, SAME, Case, Net, case, cross_entropy, forward, mlp, module
from torch import Tensor, nn
from torch.nn.utils import spectral_norm

# --- towers have no copy: they are refused, and processes have the same bits ----------------------


@case
def penalty_over_the_global_model() -> Case:
    net = mlp()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        penalty = sum(p.square().sum() for p in net.parameters())
        return cross_entropy(model, batch) + 0.05 * penalty

    return Case(REFUSED, "'net.parameters' in loss (copies.py:", model=net, loss=loss)


@module("lambda_holds_a_layer", REFUSED, "'self.net' in the model.twice (copies.py:")
class Lambda(Net):
    def __init__(self) -> None:
        super().__init__()
        self.twice = lambda x: 2 * self.net(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.twice(x)


@case
def hook_holds_another_layer() -> Case:
    model = mlp()
    first, last = model[0], model[2]
    last.register_forward_pre_hook(lambda module, args: (args[0] * first.weight.mean(),))
    return Case(REFUSED, "a hook of the model.2", model=model)


@case
def weak_reference_to_the_model() -> Case:
    model: Any = Net()
    model.net.__dict__["above"] = weakref.ref(model)
    model.net.register_forward_hook(lambda m, _i, out: out + m.above().net[0].bias.sum())
    return Case(REFUSED, "a weak reference, is the model that is trained", model=model)


@case
def computed_before_and_used() -> Case:
    """A copy cannot tell the source of an attribute's value."""
    model: Any = Net()
    model.doubled = model.net[0].weight * 2

    def loss(model: Any, batch: Any) -> Tensor:
        return cross_entropy(model, batch) + F.linear(batch[0], model.doubled).square().mean()

    return Case(REFUSED, "'doubled' was computed before", model=model, loss=loss, plain=False)


@forward(REFUSED, "lock", state=lambda: {"lock": threading.Lock()})
def uncopyable_member(self: Any, x: Tensor) -> Tensor:
    with self.lock:
        return self.net(x)


# --- towers have a copy ---------------------------------------------------------------------------


@case
def spectral_norm_of_old() -> Case:
    layer = spectral_norm(nn.Linear(8, 16))
    return Case(model=nn.Sequential(layer, nn.ReLU(), nn.Linear(16, 3)), plain=False)


@case
def scripted() -> Case:
    model = mlp()
    model[0].bias.requires_grad_(False)
    return Case(model=torch.jit.script(model))


rates = {"start": 0.1}


@module("uses_what_scripts_use")
class Usual(Net):
    """Other globals than models, the own class, a lambda, a hook, a helper: nobody is warned."""

    def __init__(self) -> None:
        super().__init__()
        self.act = lambda x: x * rates["start"]
        self.net[0].register_forward_hook(lambda _m, _i, out: out.clamp(-9, 9))
        self.forward = partial(self.forward, scale=2.0)  # type: ignore[method-assign]

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        assert isinstance(self, Usual)
        return self.act(self.net(x)) * scale


@case
def module_outside_of_the_model() -> Case:
    """A loss with a part missing in the model."""
    head = nn.Linear(3, 3)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(head(model(batch[0])), batch[1])

    return Case((SAME, REFUSED), loss=loss)
