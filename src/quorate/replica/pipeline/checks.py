"""Checks: conditions verified by a stage in every shard, as calls in its graph.

The traced forward pass is that of the example. The values behind decisions of the trace may differ
in a later shard or step, and are compared again; a difference is an error in a line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from quorate.errors import CutError, shown
from quorate.replica.nested import parts

SIMPLE = (bool, int, float, str, bytes, type(None))


class FunctionCall:
    """A function called by a graph, with a name for the graph's code."""

    def __init__(self, name: str, function: Callable[..., Any], held: object = None) -> None:
        self.__name__ = self.__qualname__ = name
        self.__module__ = __name__
        self.held = held
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self._function(*args, **kwargs)


def held(value: object) -> FunctionCall:
    """Return a call that yields an object without an expression in a graph's code."""
    return FunctionCall("held", lambda: value, value)


def holds(how: Callable[[Any], Any], wanted: object, where: str) -> FunctionCall:
    """Return a call to check that a value equals the value at the trace."""
    what = getattr(how, "__name__", "value")

    def check(value: Any) -> None:
        found = how(value)
        if type(found) is not type(wanted) or found != wanted:
            raise CutError(
                f"{where}: forward depends on {what}, which was {shown(wanted)} where the model "
                "was cut, and "
                f"is {shown(found)} in this shard",
                "move the code that depends on this value into a module that is not cut",
            )

    return FunctionCall("holds", check)


def description(value: Any) -> Any:
    """Return the kinds, names and switches in nested arguments, without sizes and numbers."""
    if isinstance(value, torch.Tensor):
        return "tensor"
    inner = parts(value)
    if inner is not None:
        return type(value), tuple((name, description(part)) for name, part in inner)
    is_fixed = isinstance(value, (bool, str, bytes, type(None), torch.dtype))
    return value if is_fixed else type(value)


def arguments_like(name: str, wanted: Any) -> FunctionCall:
    """Return a call to check that an argument of forward has the same kind as at the trace."""

    def check(value: Any) -> None:
        found = description(value)
        if found != wanted:
            raise CutError(
                f"argument {name} of forward is {shown(found)} in this shard, and was "
                f"{shown(wanted)} where the model was cut",
                "give the model arguments of the same kinds in every shard",
            )

    return FunctionCall(f"like_{name}", check)


def leaf(path: Sequence[Any]) -> FunctionCall:
    """Return a call that takes a part out of nested arguments."""

    def take(value: Any) -> Any:
        for key in path:
            value = value[key]
        return value

    return FunctionCall("leaf", take)


def rebuilt(build: Callable[[Sequence[Any]], Any]) -> FunctionCall:
    """Return a call to make the output of forward from the values inside."""
    return FunctionCall("rebuilt", lambda *values: build(values))


def as_they_were(modules: Mapping[str, nn.Module], reads_mode: set[str]) -> FunctionCall:
    """Return a call that checks the numbers, words and switches in attributes of traced modules.

    Args:
        modules: modules whose own forward was traced.
        reads_mode: names of modules whose ``training`` was read.
    """

    def simple(name: str, module: nn.Module) -> dict[str, Any]:
        return {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, SIMPLE) and (key != "training" or name in reads_mode)
        }

    before = {name: simple(name, module) for name, module in modules.items()}

    def check() -> None:
        for name, module in modules.items():
            now = simple(name, module)
            if now != before[name]:
                keys = [
                    key for key in {**before[name], **now} if now.get(key) != before[name].get(key)
                ]
                key = keys[0] if keys else ""
                where = f"{name}.{key}" if name else key
                raise CutError(
                    f"{where} was {shown(before[name].get(key))} where the model was cut, and is "
                    f"{shown(now.get(key))} now",
                    "read this attribute in a module that is not cut",
                )

    return FunctionCall("as_they_were", check)
