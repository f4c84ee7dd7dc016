"""The model of a trainer: made by the user's function, if there is one, and checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch.nn.parameter import is_lazy

from quorate.coordination.keys import key
from quorate.errors import SettingError
from quorate.replica.compiling import original_of
from quorate.replica.loss import Loss
from quorate.replica.model import buffers_without_memory, settle, sharing
from quorate.replica.phases.losses import PhaseLosses
from quorate.replica.streams import Stream
from quorate.replica.torch_internals import has_gradient_hooks
from quorate.replica.turns import Turns
from quorate.settings import function

One = torch.nn.Module | Callable[[], torch.nn.Module]
Models = One | Mapping[str, One] | Callable[[], Mapping[str, torch.nn.Module]]


def make_model(model: Models, seed: int, loss: Loss | None = None) -> torch.nn.Module:
    """Return the model, or the result of a function called with all generators seeded.

    A dict of several models becomes one module.

    Args:
        model: the argument of ``Trainer``.
        seed: seed of the numbers drawn by functions.
        loss: the loss function; losses of phases name parts of the model.

    Raises:
        SettingError: the model is no module, or has no parameter to train.
    """
    module: object = model
    if isinstance(model, Mapping) and not isinstance(model, torch.nn.Module):
        given: object = partial(_all_made, model)
    else:
        given = model
    if not isinstance(given, torch.nn.Module) and callable(given):
        make = function("model", given, "that makes a module", 0)
        with Stream() as stream:

            def build(reseed: Callable[[int], None]) -> object:
                reseed(key("model", seed))
                stream.reseed(key("model", seed))
                return make()

            module = Turns().run(build)
    if isinstance(module, Mapping) and not isinstance(module, torch.nn.Module):
        module = _joined(module)
    if isinstance(module, torch.nn.Module):
        module = original_of(module)
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
    for got, fix in buffers_without_memory(module):
        raise SettingError("model", got, "memory for each element of a buffer", fix)
    settle(module)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        expected = "at least one parameter that requires a gradient"
        raise SettingError("model", name, expected, "is everything frozen?")
    if isinstance(loss, PhaseLosses):
        loss.require_parts(module)
    return module


def _all_made(models: Mapping[str, object]) -> Mapping[str, object]:
    """Return some models by name, after calling the functions among them in order."""
    return {
        name: each() if callable(each) and not isinstance(each, torch.nn.Module) else each
        for name, each in models.items()
    }


def _joined(models: Mapping[object, object]) -> torch.nn.ModuleDict:
    """Return several models as one module.

    Raises:
        SettingError: there is no model, one is no module, or a name is not valid for a submodule.
    """
    fix = 'for example {"g": Generator(), "d": Critic()}'
    if not models:
        raise SettingError("model", "an empty dict", "a dict of modules by name", fix)
    joined = torch.nn.ModuleDict()
    for name, each in models.items():
        if not isinstance(each, torch.nn.Module):
            got = type(each).__name__
            raise SettingError(f"model {name!r}", got, "a torch.nn.Module, or its class", fix)
        try:
            joined[name] = each  # type: ignore[index]
        except (KeyError, TypeError) as error:
            expected = "names as attributes of a module may have them"
            raise SettingError("model", name, expected, f"choose another: {error}") from None
    return joined
