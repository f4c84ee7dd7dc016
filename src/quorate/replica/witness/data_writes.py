"""Writes to parameters by ``.data``: torch does not count them, and they may change no value yet.

A clamp without an effect in the trial shard may have an effect a hundred steps later. So a model
whose code names ``.data`` is watched operator by operator.
"""

from __future__ import annotations

import types
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from quorate.replica.beside.composed import Composed
from quorate.replica.loss import Loss
from quorate.replica.placement.schema import arguments
from quorate.replica.torch_internals import OperatorMode
from quorate.replica.witness.kept import names_of


class WriteWatch(OperatorMode):
    """A context that notes the parameters written by this thread, in any way.

    Args:
        parameters: parameters by name.
        others: tensors with permitted writes; parameters in the same memory are not watched.
    """

    def __init__(
        self, parameters: Mapping[str, torch.Tensor], others: Iterable[torch.Tensor] = ()
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[str] = set()
        places = ((_extent(tensor), name) for name, tensor in parameters.items())
        free = [_extent(tensor) for tensor in others]
        self._places = sorted(
            (start, end, name)
            for (start, end), name in places
            if end > start and not any(first < end and start < last for first, last in free)
        )
        self._starts = [start for start, _, _ in self._places]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for value, is_written, _ in arguments(func, args, kwargs):
            for tensor in (value if isinstance(value, (list, tuple)) else (value,)) * is_written:
                if isinstance(tensor, torch.Tensor):
                    self._note(tensor)
        return func(*args, **kwargs)

    def _note(self, tensor: torch.Tensor) -> None:
        start, end = _extent(tensor)
        number = max(0, bisect_right(self._starts, start) - 1)
        for first, last, name in self._places[number:]:
            if first >= end:
                return
            if start < last:
                self.found.add(name)


def names_data(model: torch.nn.Module, loss: Loss) -> bool:
    """Return whether code of a model or a loss function, outside of torch, names ``.data``."""
    return any("data" in names_of(function.__code__) for function in functions_of(model, loss))


def functions_of(model: torch.nn.Module, loss: Loss) -> Iterator[types.FunctionType]:
    """Yield the functions that a model and a loss function contain and call, except torch's own."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    functions = [
        f for kind in kinds if not _is_torchs(kind.__module__) for f in vars(kind).values()
    ]
    seen: set[int] = set()
    for function in (*functions, loss):
        yield from _functions(function, seen)


def _functions(function: Callable[..., Any] | Any, seen: set[int]) -> Iterator[types.FunctionType]:
    if isinstance(function, Composed):
        for each in function.functions.values():
            yield from _functions(each, seen)
        return
    function = getattr(function, "func", getattr(function, "__func__", function))
    if not isinstance(function, types.FunctionType):
        called = vars(type(function)).get("__call__")
        if not isinstance(called, types.FunctionType) or isinstance(function, torch.nn.Module):
            return
        function = called
    if id(function) in seen or _is_torchs(function.__module__ or ""):
        return
    seen.add(id(function))
    yield function
    for other in _named(function, [*names_of(function.__code__)]):
        yield from _functions(other, seen)


def _named(function: types.FunctionType, names: list[str]) -> Iterator[Any]:
    """Yield the functions called by a function by name: of the same file, and in the closure."""
    for name in names:
        if isinstance(other := function.__globals__.get(name), types.FunctionType):
            yield other
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue


def _is_torchs(module: str) -> bool:
    return module.partition(".")[0] in ("torch", "builtins", "quorate")


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first address of a tensor's memory, and the address behind its last element."""
    try:
        start = tensor.data_ptr()
    except RuntimeError:  # no memory: sparse, fake
        return 0, 0
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return 0, 0
    steps = sum((n - 1) * by for n, by in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (steps + 1) * tensor.element_size()
