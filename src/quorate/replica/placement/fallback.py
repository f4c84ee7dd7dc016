"""Soft placement: an operator without a kernel on a device runs on the CPU.

Arguments are copied to the CPU, results back, and written arguments are updated in place. This
happens below autograd, so derivatives are made as usual, and may lack a kernel themselves. A random
operator draws from the shard's stream, as in a shard on the CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from quorate.replica.nested import leaves, tensors
from quorate.replica.on_host import CPU, on_host
from quorate.replica.placement.call_site import CallSite, CallSites
from quorate.replica.placement.schema import arguments
from quorate.replica.streams import Stream
from quorate.replica.torch_internals import OperatorMode, is_composite, schema_arguments


def is_lacking(error: RuntimeError) -> bool:
    """Return whether an error may mean that a device has no kernel for an operator or a dtype."""
    return isinstance(error, NotImplementedError) or "not implemented for '" in str(error)


@dataclass(frozen=True)
class MissingKernel:
    """An operator without a kernel, with its first call site."""

    operator: str
    device: torch.device
    call_site: CallSite
    in_backward: bool

    @property
    def kernel(self) -> str:
        """The missing kernel, for a sentence."""
        return f"{self.operator} has no kernel on {self.device.type}"

    @property
    def caller(self) -> str:
        """The call site of the operator, for a sentence."""
        return f"called in {self.call_site.said(in_backward=self.in_backward)}"


Key = tuple[Any, str, tuple[torch.dtype, ...]]  # operator, kind of device, dtypes of its tensors


class SoftPlacement(OperatorMode):
    """A context in which operators without a kernel run on the CPU.

    A writing operator is never run twice: if it failed after a possible write, the error is raised,
    and the operator added to ``known``. The caller then begins the block again.

    Args:
        known: operators without a kernel; new ones are added.
        stream: the shard's stream.
        call_sites: finds call sites. None: errors of unknown operators are raised without a search.
        runs: whether the operators run on the CPU; otherwise they are found, and their error is
            raised.
    """

    def __init__(
        self,
        known: dict[Key, MissingKernel],
        stream: Stream,
        call_sites: CallSites | None = None,
        *,
        runs: bool = True,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.failed: MissingKernel | None = None  # the operator whose error was raised
        self.stuck = ""  # why the operator did not run on the CPU
        self.is_unfinished = False  # not run on the CPU, because it had begun to write
        self._known = known
        self._operators = {operator for operator, *_ in known}
        self._stream = stream
        self._call_sites = call_sites
        self._runs = runs

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        call_site = None if self._call_sites is None else self._call_sites.find(sys._getframe(1))
        if func in self._operators and _key(func, args, kwargs) in self._known:
            return self._on_cpu(func, args, kwargs)
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if call_site is None or not is_lacking(error):
                raise
            device = _device(args, kwargs)
            self.failed = MissingKernel(func.name().partition(".")[0], device, *call_site)
            if not self._runs or device == CPU:
                raise
            if (why := _never(func, args, kwargs)) is not None:
                self.stuck = why
                raise
            self._known[_key(func, args, kwargs)] = self.failed
            self._operators.add(func)
            writes = any(written for _, written, _ in arguments(func, args, kwargs))
            if writes and is_composite(func, device):
                self.is_unfinished = True  # one of its parts has no kernel
                raise
            try:
                returned = self._on_cpu(func, args, kwargs)
            except RuntimeError as other:
                if is_lacking(other):
                    self.stuck = str(other).partition("\n")[0]
                raise
            self.failed = None
            return returned

    def _on_cpu(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            args, kwargs = _drawing(func, args, kwargs, self._stream)
            with self._stream.lent():
                return func(*args, **kwargs)

        return on_host(func, args, kwargs, _device(args, kwargs), run=run)


def _never(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """Return why an operator cannot run on the CPU, or None."""
    if func.is_view or torch.Tag.inplace_view in func.tags:
        return "what it returns shares memory with what it is given"
    given = leaves((args, kwargs))
    if any(isinstance(value, torch.Generator) and value.device != CPU for value in given):
        return "it draws from a generator of the device"
    return None


def _drawing(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], stream: Stream
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments, with the shard's stream as generator if none is given."""
    for number, argument in enumerate(schema_arguments(func)):
        if argument.name == "generator":
            given = args[number] if number < len(args) else kwargs.get("generator")
            return args[:number], {**kwargs, "generator": given or stream.generator}
    return args, kwargs


def _key(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Key:
    dtypes = tuple(tensor.dtype for tensor in tensors((args, kwargs)))
    return func, _device(args, kwargs).type, dtypes


def _device(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.device:
    """Return the device of an operator: of the first argument not on the CPU."""
    for value in leaves((args, kwargs)):
        device = value.device if isinstance(value, torch.Tensor) else value
        if isinstance(device, torch.device) and device != CPU:
            return device
    return CPU
