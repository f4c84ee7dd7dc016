"""Attributes of an optimizer that its state_dict leaves out, and the optimizers nested in them.

A wrapper (Lookahead, SAM) has another optimizer in an attribute; a chain has several in a list. The
state of each nested optimizer is read by its own state_dict, and so is the state of every attribute
with a state_dict: schedules, averages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

# Attributes that torch's schedules add to an optimizer.
_OF_SCHEDULES = frozenset(("step", "_opt_called", "_step_count"))


class Attribute(NamedTuple):
    """An attribute of an optimizer."""

    value: Any
    put: Callable[[Any], None]  # replaces the value


def attributes(optimizer: Optimizer) -> dict[str, Attribute]:
    """Return the attributes beyond those of every optimizer, by name: ``count``, ``base.count``."""
    found: dict[str, Attribute] = {}
    _walk(optimizer, "", found, {id(optimizer)})
    return found


def optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """Return an optimizer, followed by the optimizers nested in it."""
    inner = (attribute.value for attribute in attributes(optimizer).values())
    return [optimizer, *(value for value in inner if isinstance(value, Optimizer))]


def state_of(value: Any, parameters: Mapping[int, str]) -> Any:
    """Return the state to save for an attribute: the result of ``state_dict()``, or else the value.

    Args:
        parameters: names of the model's parameters by ``id``. A module with some of them is the
            model, and is not saved as an attribute.
    """
    if isinstance(value, torch.Generator):
        return value.get_state()
    return value.state_dict() if _has_state_dict(value, parameters) else value


def is_state_of(own: torch.Generator, value: Any) -> bool:
    """Return whether a generator accepts a saved state."""
    try:
        torch.Generator(own.device).set_state(value)
    except (RuntimeError, TypeError):
        return False
    return True


def put(attribute: Attribute, value: Any, parameters: Mapping[int, str]) -> None:
    """Load a saved value into an attribute. Containers are filled in place: others hold them."""
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
        own.update({key: placed_like(item, kept.get(key)) for key, item in value.items()})
    elif isinstance(own, list) and isinstance(value, list):
        own[:] = [
            placed_like(item, own[n] if n < len(own) else None) for n, item in enumerate(value)
        ]
    else:
        attribute.put(placed_like(value, own))


def place_of_new(optimizer: Optimizer, name: str) -> Callable[[Any], None] | None:
    """Return a setter for an attribute created during a step; None if the name is not valid."""
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
    """Load a state dict into an optimizer, and keep the dtypes and strides of the saved tensors.

    torch's ``load_state_dict`` casts floating-point state to the dtype of the parameter, and turns
    a string into a generator's repr. It also replaces the groups and the table of states, although
    a wrapper and the wrapped optimizer, or a schedule, may share them: so the former objects are
    filled with the loaded values, and stay shared.
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
    if not isinstance(container, tuple):  # a tuple is immutable
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


def placed_like(value: Any, own: Any) -> Any:
    """Return a value with its tensors moved to the devices of the present tensors."""
    if isinstance(value, torch.Tensor) and isinstance(own, torch.Tensor):
        return value if id(value) == id(own) else value.to(own.device)
    if type(value) in (list, tuple) and type(own) is type(value) and len(own) == len(value):
        return type(value)(placed_like(v, o) for v, o in zip(value, own, strict=True))
    if isinstance(value, dict) and isinstance(own, dict):
        return {key: placed_like(item, own.get(key)) for key, item in value.items()}
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
    """Return the attributes of every optimizer, without state of their own: hooks, groups, state.

    Computed at the first call and not at import: torch's first optimizer imports torch's compiler,
    which takes as long as importing torch.
    """
    return _OF_SCHEDULES | frozenset(vars(torch.optim.SGD([torch.zeros(1)], lr=1.0)))
