"""Listening: torch's functions, calls of modules and reads of their tensors come to a trace.

torch offers no such place for modules, so ``nn.Module.__call__`` and ``__getattr__`` are others
while a forward pass is traced, as ``torch.fx`` has them. So is ``len``, which has to return a plain
number otherwise, and would make the rows of the example those of every shard; and ``isinstance``,
which answers for what a recorded value stands for. Other threads and whatever is called quietly get
what they always get.
"""

from __future__ import annotations

import builtins
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.utils.checkpoint
from torch import nn
from torch.overrides import TorchFunctionMode

from quorate.replica.pipeline import checks
from quorate.replica.pipeline.recorded import is_recorded, recorded_in, value_of
from quorate.replica.torch_internals import checkpoint_body

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

    def inside(self, used: nn.Module | torch.Tensor) -> None:
        """Hear of what something uses that is noted as a whole, or another thread."""

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
    call, read = nn.Module.__call__, nn.Module.__getattr__
    length, is_instance = builtins.len, builtins.isinstance
    # Of functions with a backward of their own: forward would be followed, and that forgotten.
    apply: Any = vars(torch.autograd.Function)["apply"]
    factories = [(torch, name, getattr(torch, name)) for name in FACTORIES.split()]
    # Scripts import ``checkpoint`` by name, so what it calls is another: see ``checkpoint_body``.
    checkpoint = torch.utils.checkpoint.checkpoint
    modes = {module: module.training for module in followed}

    def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not listener.is_noting:
            listener.inside(module)
            return call(module, *args, **kwargs)
        return listener.module(module, lambda *a, **k: call(module, *a, **k), args, kwargs)

    def looked_up(module: nn.Module, name: str) -> Any:
        if name == "training" and module in modes:
            training = modes[module]
            return listener.mode(module, training) if listener.is_noting else training
        value = read(module, name)
        if is_recorded(value) or not isinstance(value, torch.Tensor):
            return value
        if not listener.is_noting:
            listener.inside(value)
            return value
        return listener.attribute(value)

    def counted(value: Any) -> Any:
        if is_recorded(value) and listener.is_noting:
            return listener.function(length, (value,), {})
        return length(value)

    def is_of(value: Any, kinds: Any) -> bool:
        return is_instance(value_of(value) if is_recorded(value) else value, kinds)

    def applied(kind: type, *args: Any, **kwargs: Any) -> Any:
        own = functools.partial(apply.__func__, kind)
        if listener.is_noting and any(True for _ in recorded_in((args, kwargs))):
            return listener.function(checks.Call(kind.__name__, own), args, kwargs)
        return own(*args, **kwargs)

    def noticing(
        factory: Callable[..., Any], body: Callable[..., Any] | None = None
    ) -> Callable[..., Any]:
        def made(*args: Any, **kwargs: Any) -> Any:
            if listener.is_noting and any(True for _ in recorded_in((args, kwargs))):
                return listener.function(factory, args, kwargs)
            return (body or factory)(*args, **kwargs)

        return made

    for module in modes:
        del vars(module)["training"]  # so that a read of it comes to ``__getattr__``
    nn.Module.__call__ = called  # type: ignore[method-assign]
    nn.Module.__getattr__ = looked_up  # type: ignore[method-assign]
    builtins.len, builtins.isinstance = counted, is_of
    torch.autograd.Function.apply = classmethod(applied)  # type: ignore[assignment, method-assign]
    for owner, name, factory in factories:
        setattr(owner, name, noticing(factory))
    try:
        with _Mode(listener), checkpoint_body(lambda body: noticing(checkpoint, body)):
            yield
    finally:
        nn.Module.__call__ = call  # type: ignore[method-assign]
        nn.Module.__getattr__ = read  # type: ignore[method-assign]
        builtins.len, builtins.isinstance = length, is_instance
        torch.autograd.Function.apply = apply  # type: ignore[method-assign]
        for owner, name, factory in factories:
            setattr(owner, name, factory)
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
