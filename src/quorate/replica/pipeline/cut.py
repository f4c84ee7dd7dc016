"""The cut of a model into stages: at named modules, each of which begins the next stage.

The forward pass is called once with an example and traced (``trace.py``); its calls are dealt to
stages in order (``deal.py``), and the stages compute the model's results, bit for bit
(``stage_graph.py``). Stages compute in the mode of the model at the cut; evaluation needs a cut of
its own if forward reads ``training`` itself.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from quorate.errors import CutError, nearest
from quorate.machine.devices import device_types, has_streams
from quorate.replica.model import unchanged
from quorate.replica.pipeline.deal import dealt
from quorate.replica.pipeline.stage_graph import StageGraph, arguments
from quorate.replica.pipeline.trace import ForwardTrace

MOST_NAMED = 12  # names of modules in an error


def cut(
    model: nn.Module,
    split: Sequence[str],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    devices: Sequence[torch.device] = (),
) -> tuple[StageGraph, ...]:
    """Cut a model into stages, one more than there are split points.

    The model is called once and then restored, and so is torch's default generator.

    Args:
        model: the model, in training mode, or in the mode of the shards to compute in stages.
        split: names of modules; a stage begins with the first call of each.
        args: positional arguments of a call of the model, from one shard.
        kwargs: keyword arguments of the call.
        devices: devices of the stages, in turn; empty: the host.

    Returns:
        Stages, in the order in which forward calls them.

    Raises:
        CutError: forward does not call a module of a given name, a stage would be empty, or the
            code at a cut cannot be cut.
    """
    points = {}
    for name in split:
        if name in points:
            raise CutError(f"{name} is named twice", "name each module once")
        points[name] = _named(model, name)
    with _traced(model, points, args, kwargs, devices=devices) as trace:
        missed = [name for name in points if name not in trace.reached]
        if missed:
            called = _called_below(model, missed[0], args, kwargs)
            why = f"forward does not call {missed[0]} with this batch"
            of_functions = {used for _, used in trace.inside_functions}
            if not of_functions.isdisjoint({points[missed[0]], *_around(model, missed[0])}):
                why = (
                    f"{missed[0]} is called by a function, as torch's checkpoint, which is not cut"
                )
            raise CutError(why, _instead(called))
        stages = dealt(model, trace)
    for stage, begins in zip(stages, ("the model", *trace.reached), strict=True):
        if not stage.modules and not stage.parameters and len(stages) > 1:
            follows = trace.reached[stage.index] if stage.index < len(stages) - 1 else "the end"
            why = f"no module is called between {begins} and {follows}: a stage would have no work"
            raise CutError(why, _instead(candidates(model, args, kwargs)))
    return tuple(
        replace(stage, begins=name)
        for stage, name in zip(stages, ("", *trace.reached), strict=True)
    )


def candidates(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> tuple[str, ...]:
    """Return the names of possible cuts of a model: modules in the order of forward's calls.

    These are all called top-level modules except the first, and the items of lists; for a model
    with a single called module, those of the module.

    Raises:
        CutError: the forward pass of the model itself cannot be followed.
    """
    inside: tuple[str, ...] = ()
    while True:
        try:
            with _traced(model, {}, args, kwargs, inside) as trace:
                (whole,) = dealt(model, trace)
        except CutError:
            if not inside:
                raise
            return ()
        if len(whole.modules) > 1:
            return whole.modules[1:]
        if not whole.modules or not [*model.get_submodule(whole.modules[0]).children()]:
            return ()
        inside = (*inside, whole.modules[0])


@contextmanager
def _traced(
    model: nn.Module,
    points: Mapping[str, nn.Module],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    inside: Sequence[str] = (),
    devices: Sequence[torch.device] = (),
) -> Iterator[ForwardTrace]:
    """Trace a call inside the block; forget its values afterwards, even after an error."""
    named = arguments(model, args, kwargs)
    trace = ForwardTrace(model, points, inside, devices)
    try:
        with unchanged(model), _draws_undone(model), torch.enable_grad():
            trace.run(named, lambda given: _call(model, given))
        yield trace
    finally:
        trace.forget()


def _call(model: nn.Module, given: dict[str, Any]) -> Any:
    """Call a model with arguments by name, including positional-only arguments."""
    signature = inspect.signature(model.forward)
    bound = inspect.BoundArguments(signature, OrderedDict(given))
    # Without hooks: each call of the model runs them, around the work of a stage.
    return model.forward(*bound.args, **bound.kwargs)


def _draws_undone(model: nn.Module) -> AbstractContextManager[None]:
    """Return a context that restores the generators of the model's devices."""
    devices = {p.device for p in model.parameters() if has_streams(p.device)}
    numbers = [device.index for device in devices]
    return torch.random.fork_rng(numbers, device_type=device_types()[-1])


def _named(model: nn.Module, name: str) -> nn.Module:
    """Return a module by its name.

    Raises:
        CutError: there is no such module.
    """
    modules: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
    del modules[""]
    if name not in modules:
        near = nearest(name, modules)
        tops = [own for own, _ in model.named_children()]
        fix = f"did you mean {near}?" if near else f"it has {listed(tops)}"
        raise CutError(f"the model has no module {name!r}", fix)
    return modules[name]


def _around(model: nn.Module, name: str) -> list[nn.Module]:
    """Return the modules that contain a module, except for the model itself."""
    words = name.split(".")
    return [model.get_submodule(".".join(words[:count])) for count in range(1, len(words))]


def _instead(names: Sequence[str]) -> str:
    """Return the cure for an impossible cut, with names that fit."""
    if not names:
        return "leave split out: forward calls no other module that it could be cut before"
    return f"cut before one of {listed(names)}"


def _called_below(
    model: nn.Module, name: str, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> Sequence[str]:
    """Return names to use instead of a module that is not called."""
    below = [f"{name}.{inner}" for inner, _ in model.get_submodule(name).named_children()]
    tops = candidates(model, args, kwargs)
    return [own for own in tops if own in below] or tops


def listed(names: Sequence[str]) -> str:
    """Return names of modules as text for a message."""
    if not names:
        return "no module"
    more = "" if len(names) <= MOST_NAMED else f" and {len(names) - MOST_NAMED} more"
    return ", ".join(names[:MOST_NAMED]) + more
