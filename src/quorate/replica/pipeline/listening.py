"""Listening: torch's functions, calls of modules and reads of their tensors come to a trace.

torch offers no such place for modules, so ``nn.Module.__call__`` and ``__getattr__`` are others
while a forward pass is traced, as ``torch.fx`` has them; so is ``len``, which has to return a plain
number otherwise, and would make the rows of the example those of every shard. Other threads and
whatever is called quietly get what they always get.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from quorate.replica.pipeline.recorded import is_recorded, recorded_in

# Functions of torch's that make tensors of numbers: its parser of arguments takes no stand-ins.
FACTORIES = """
    arange as_tensor empty eye full linspace ones rand randint randn randperm tensor tril_indices
    triu_indices zeros
"""


class Listener(Protocol):
    """Who is told."""

    @property
    def is_noting(self) -> bool:
        """Whether the calling thread's calls are noted now."""

    def function(self, target: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Note and make a call of a function."""

    def module(self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Note and make a call of a module."""

    def attribute(self, tensor: torch.Tensor) -> Any:
        """Return what stands for a tensor that a module has."""

    def mode(self, module: nn.Module, training: bool) -> bool:
        """Note that the mode of a module was read."""


@contextmanager
def listening(listener: Listener, followed: Iterable[nn.Module]) -> Iterator[None]:
    """Within the block a listener is told.

    Args:
        listener: of the calling thread.
        followed: modules whose ``training`` it wants to know of.
    """
    call, read, length = nn.Module.__call__, nn.Module.__getattr__, builtins.len
    factories = [(name, getattr(torch, name)) for name in FACTORIES.split()]
    modes = {module: module.training for module in followed}

    def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not listener.is_noting:
            return call(module, *args, **kwargs)
        return listener.module(module, lambda *a, **k: call(module, *a, **k), args, kwargs)

    def looked_up(module: nn.Module, name: str) -> Any:
        if name == "training" and module in modes:
            training = modes[module]
            return listener.mode(module, training) if listener.is_noting else training
        value = read(module, name)
        if is_recorded(value) or not isinstance(value, torch.Tensor) or not listener.is_noting:
            return value
        return listener.attribute(value)

    def counted(value: Any) -> Any:
        if is_recorded(value) and listener.is_noting:
            return listener.function(length, (value,), {})
        return length(value)

    def noticing(factory: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, **kwargs: Any) -> Any:
            if listener.is_noting and any(True for _ in recorded_in((args, kwargs))):
                return listener.function(factory, args, kwargs)
            return factory(*args, **kwargs)

        return made

    for module in modes:
        del vars(module)["training"]  # so that a read of it comes to ``__getattr__``
    nn.Module.__call__ = called  # type: ignore[method-assign]
    nn.Module.__getattr__ = looked_up  # type: ignore[method-assign]
    builtins.len = counted
    for name, factory in factories:
        setattr(torch, name, noticing(factory))
    try:
        with _Mode(listener):
            yield
    finally:
        nn.Module.__call__ = call  # type: ignore[method-assign]
        nn.Module.__getattr__ = read  # type: ignore[method-assign]
        builtins.len = length
        for name, factory in factories:
            setattr(torch, name, factory)
        for module, training in modes.items():
            vars(module).setdefault("training", training)


class _Mode(TorchFunctionMode):
    """Brings torch's functions to a listener."""

    def __init__(self, listener: Listener) -> None:
        super().__init__()
        self._listener = listener

    def __torch_function__(
        self, func: Callable[..., Any], _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if not self._listener.is_noting:
            return func(*args, **(kwargs or {}))
        return self._listener.function(func, args, kwargs or {})
