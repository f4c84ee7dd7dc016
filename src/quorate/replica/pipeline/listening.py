"""Listening: reports torch's functions, calls of modules and reads of their tensors to a trace.

torch offers no hook for modules, so ``nn.Module.__call__`` and ``__getattr__`` are replaced while a
forward pass is traced, as in ``torch.fx``. So is ``len``, which must return a plain number
otherwise, and would make the example's number of rows a constant; and ``isinstance``, which answers
for the value behind a recorded value. Other threads and quiet calls get the usual results.
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

# Functions of torch that make tensors of numbers: their argument parser takes no recorded values.
FACTORIES = """
    arange as_tensor empty eye full linspace ones rand randint randn randperm tensor tril_indices
    triu_indices zeros
"""


class CallListener(Protocol):
    """The receiver of reports."""

    @property
    def is_noting(self) -> bool:
        """True if the calling thread's calls are recorded now."""

    def function(self, target: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Record and make a call of a function."""

    def module(self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Record and make a call of a module."""

    def inside(self, used: nn.Module | torch.Tensor) -> None:
        """Receive a module or tensor used inside a call recorded as a whole, or by a thread."""

    def attribute(self, tensor: torch.Tensor) -> Any:
        """Return the recorded value for a tensor of a module."""

    def mode(self, module: nn.Module, training: bool) -> bool:
        """Record that the mode of a module was read."""


@contextmanager
def listening(listener: CallListener, followed: Iterable[nn.Module]) -> Iterator[None]:
    """Report calls and reads to a listener inside the block.

    Args:
        listener: the listener of the calling thread.
        followed: modules whose reads of ``training`` are reported.
    """
    call, read = nn.Module.__call__, nn.Module.__getattr__
    length, is_instance = builtins.len, builtins.isinstance
    # For functions with a backward of their own: forward would be followed, and backward lost.
    apply: Any = vars(torch.autograd.Function)["apply"]
    factories = [(torch, name, getattr(torch, name)) for name in FACTORIES.split()]
    # Scripts import ``checkpoint`` by name, so its body is replaced: see ``checkpoint_body``.
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
            return listener.function(checks.FunctionCall(kind.__name__, own), args, kwargs)
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
        del vars(module)["training"]  # so that a read calls ``__getattr__``
    nn.Module.__call__ = called  # type: ignore[method-assign]
    nn.Module.__getattr__ = looked_up  # type: ignore[method-assign]
    builtins.len, builtins.isinstance = counted, is_of
    torch.autograd.Function.apply = classmethod(applied)  # type: ignore[assignment, method-assign]
    for owner, name, factory in factories:
        setattr(owner, name, noticing(factory))
    try:
        with _ReportingMode(listener), checkpoint_body(lambda body: noticing(checkpoint, body)):
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


class _ReportingMode(TorchFunctionMode):
    """A mode that reports torch's functions to a listener."""

    def __init__(self, listener: CallListener) -> None:
        super().__init__()
        self._listener = listener

    def __torch_function__(
        self, func: Callable[..., Any], _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if not self._listener.is_noting:
            return func(*args, **(kwargs or {}))
        return self._listener.function(func, args, kwargs or {})
