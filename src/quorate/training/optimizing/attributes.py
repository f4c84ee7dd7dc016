"""What an optimizer keeps beside its state_dict: attributes, and optimizers within it, with theirs.

A wrapper (Lookahead, SAM) has another optimizer in an attribute, a chain has several in a list. Of
each the own state_dict is asked for, and so of whatever else has one: schedules, averages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

# What schedules put into an optimizer.
_OF_SCHEDULES = frozenset(("step", "_opt_called", "_step_count"))


class Attribute(NamedTuple):
    """One of them."""

    value: Any
    put: Callable[[Any], None]  # another in its place


def attributes(optimizer: Optimizer) -> dict[str, Attribute]:
    """Return what an optimizer has beside what all have: ``count``, ``base``, ``base.count``."""
    found: dict[str, Attribute] = {}
    _walk(optimizer, "", found, {id(optimizer)})
    return found


def optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """Return it, and those within it."""
    inner = (attribute.value for attribute in attributes(optimizer).values())
    return [optimizer, *(value for value in inner if isinstance(value, Optimizer))]


def state_of(value: Any, parameters: Mapping[int, str]) -> Any:
    """Return what is to be saved of an attribute: what its own ``state_dict`` gives, if it has one.

    Args:
        parameters: of the model, by ``id``: a module that has them is the model itself, say.
    """
    if isinstance(value, torch.Generator):
        return value.get_state()
    return value.state_dict() if _has_state_dict(value, parameters) else value


def is_state_of(own: torch.Generator, value: Any) -> bool:
    """Return whether a generator can be brought to a state that was saved."""
    try:
        torch.Generator(own.device).set_state(value)
    except (RuntimeError, TypeError):
        return False
    return True


def put(attribute: Attribute, value: Any, parameters: Mapping[int, str]) -> None:
    """Give an attribute a value that was saved. Containers stay who they are: others hold them."""
    own = attribute.value
    if isinstance(own, Optimizer):
        load_into(own, value)
    elif _has_state_dict(own, parameters):
        own.load_state_dict(value)
    elif isinstance(own, torch.Generator):
        own.set_state(value)
    elif isinstance(own, dict) and isinstance(value, dict):
        kept = dict(own)
        own.clear()
        own.update({key: _like(item, kept.get(key)) for key, item in value.items()})
    elif isinstance(own, list) and isinstance(value, list):
        own[:] = [_like(item, own[n] if n < len(own) else None) for n, item in enumerate(value)]
    else:
        attribute.put(_like(value, own))


def place_of_new(optimizer: Optimizer, name: str) -> Callable[[Any], None] | None:
    """Return what puts an attribute that is made in a step into its place; None if it has none."""
    path, _, own = name.rpartition(".")
    owner = optimizer
    if path:
        holder = attributes(optimizer).get(path)
        if holder is None or not isinstance(holder.value, Optimizer):
            return None
        owner = holder.value
    if not own.isidentifier() or own in _standard_attributes() or hasattr(owner, own):
        return None
    return partial(setattr, owner, own)


def load_into(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Have an optimizer load a state dict, and keep the dtypes and strides that it had.

    torch brings what is floating-point to the parameter's dtype, and makes a string of a string's
    generator. It makes new groups and a new table of states, where a wrapper and what it wraps, or
    a schedule, may have the same ones: those that were there are filled, and stay shared.
    """
    saved = {number: dict(entries) for number, entries in _by_number(state).items()}
    own = vars(optimizer)
    groups: Any = own.get("param_groups")
    table: Any = own.get("state")
    optimizer.load_state_dict(state)
    if isinstance(groups, list) and own["param_groups"] is not groups:
        for group, values in zip(groups, own["param_groups"], strict=True):
            if group is not values:
                group.clear()
                group.update(values)
        own["param_groups"] = groups
    if isinstance(table, dict) and own["state"] is not table:
        loaded = dict(own["state"])
        table.clear()
        table.update(loaded)
        own["state"] = table
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, entries in saved.items():
        there = optimizer.state.get(parameters[number]) if number < len(parameters) else None
        if not isinstance(there, dict):
            continue
        for entry, value in entries.items():
            if entry in there:
                there[entry] = _as_saved(value, there[entry])


def _walk(optimizer: Optimizer, prefix: str, found: dict[str, Attribute], seen: set[int]) -> None:
    for name, value in vars(optimizer).items():
        if name not in _standard_attributes():
            _note(prefix + name, value, partial(setattr, optimizer, name), found, seen)


def _note(
    name: str,
    value: Any,
    put: Callable[[Any], None],
    found: dict[str, Attribute],
    seen: set[int],
) -> None:
    if isinstance(value, Optimizer):
        if id(value) not in seen:
            seen.add(id(value))
            found[name] = Attribute(value, put)
            _walk(value, f"{name}.", found, seen)
        return
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        items = [*value.items()]
    elif isinstance(value, (list, tuple)):
        items = [*enumerate(value)]
    if any(isinstance(item, Optimizer) for _, item in items):
        for key, item in items:
            _note(f"{name}.{key}", item, partial(_put_item, value, key), found, seen)
    else:
        found[name] = Attribute(value, put)


def _put_item(container: Any, key: Any, value: Any) -> None:
    if not isinstance(container, tuple):  # what is in one can be no other
        container[key] = value


def _has_state_dict(value: Any, parameters: Mapping[int, str]) -> bool:
    if isinstance(value, type) or not all(
        callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict")
    ):
        return False
    is_model = isinstance(value, torch.nn.Module) and any(
        id(p) in parameters for p in value.parameters()
    )
    return not is_model


def _like(value: Any, own: Any) -> Any:
    """Return a value with its tensors on the devices of those that are there."""
    if isinstance(value, torch.Tensor) and isinstance(own, torch.Tensor):
        return value if id(value) == id(own) else value.to(own.device)
    if type(value) in (list, tuple) and type(own) is type(value) and len(own) == len(value):
        return type(value)(_like(v, o) for v, o in zip(value, own, strict=True))
    if isinstance(value, dict) and isinstance(own, dict):
        return {key: _like(item, own.get(key)) for key, item in value.items()}
    return value


def _by_number(state: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    entries = state.get("state")
    if not isinstance(entries, dict):
        return {}
    return {k: v for k, v in entries.items() if isinstance(k, int) and isinstance(v, dict)}


def _as_saved(saved: Any, loaded: Any) -> Any:
    if isinstance(saved, torch.Tensor) and isinstance(loaded, torch.Tensor):
        same = (saved.dtype, saved.stride()) == (loaded.dtype, loaded.stride())
        return loaded if same or saved.shape != loaded.shape else saved.to(loaded.device)
    if type(saved) in (list, tuple) and isinstance(loaded, (list, tuple)):
        return type(saved)(_as_saved(s, v) for s, v in zip(saved, loaded, strict=True))
    if isinstance(saved, dict) and isinstance(loaded, dict):
        return {key: _as_saved(saved[key], loaded.get(key)) for key in saved}
    return saved if isinstance(saved, str) else loaded


@cache
def _standard_attributes() -> frozenset[str]:
    """Return what every optimizer has, no state of its own: hooks, and what its state_dict has.

    Asked for late: torch's first optimizer imports its compiler, which takes as long as torch.
    """
    return _OF_SCHEDULES | frozenset(vars(torch.optim.SGD([torch.zeros(1)], lr=1.0)))
