"""The model that a trainer was given: made, if a function was given, and checked."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.parameter import is_lazy

from quorate.coordination.keys import key
from quorate.errors import SettingError
from quorate.replica.model import settle, sharing
from quorate.replica.streams import Stream
from quorate.replica.torch_internals import has_gradient_hooks
from quorate.replica.turns import Turns
from quorate.settings import function


def make_model(
    model: torch.nn.Module | Callable[[], torch.nn.Module], seed: int
) -> torch.nn.Module:
    """Return the model itself, or what a function makes while all generators are seeded.

    Raises:
        SettingError: it is no module, or has nothing to train.
    """
    module: object = model
    if not isinstance(model, torch.nn.Module) and callable(model):
        make = function("model", model, "that makes a module", 0)
        with Stream() as stream:

            def build(reseed: Callable[[int], None]) -> object:
                reseed(key("model", seed))
                stream.reseed(key("model", seed))
                return make()

            module = Turns().run(build)
    name = type(module).__name__
    if not isinstance(module, torch.nn.Module):
        expected = "a torch.nn.Module, or a function that makes one"
        raise SettingError("model", name, expected, "pass Net() or Net")
    if any(is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers())):
        fix = "call a lazy module once on a batch before it is trained"
        raise SettingError("model", name, "parameters that have their shapes", fix)
    if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        raise SettingError("model", name, "parameters that have values", "it is on device meta")
    for label, parameter in module.named_parameters():
        if has_gradient_hooks(parameter):
            expected = "parameters without gradient hooks, which a worker's copy would not have"
            raise SettingError("model", f"a hook on {label}", expected, "put it into the loss")
    for label, other in sharing(module):
        got = f"{label} and {other}, which lie in the same memory"
        fix = f"make them one parameter: assign {other} itself, and not its .data"
        if label == other:
            got = f"{label}, of which several elements are one in memory"
            fix = "an expanded tensor needs a clone() before it is made a parameter"
        raise SettingError("model", got, "memory for each element of a parameter", fix)
    settle(module)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        expected = "at least one parameter that requires a gradient"
        raise SettingError("model", name, expected, "is everything frozen?")
    return module
