"""Soft placement: an operator that a device has no kernel for runs on the CPU.

Its arguments are copied there, its results back, and what it writes is written where it lies. It
happens below autograd, so derivatives are made as ever, and may be missing a kernel themselves.
What draws random numbers draws from the shard's stream, as a shard on the CPU does.
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
    """Return whether torch may mean that a device has no kernel for an operator or a dtype."""
    return isinstance(error, NotImplementedError) or "not implemented for '" in str(error)


@dataclass(frozen=True)
class Lacking:
    """An operator without a kernel, and who called it first."""

    operator: str
    device: torch.device
    call_site: CallSite
    in_backward: bool

    @property
    def kernel(self) -> str:
        """What is lacking, for a sentence."""
        return f"{self.operator} has no kernel on {self.device.type}"

    @property
    def caller(self) -> str:
        """Where the operator was called, for a sentence."""
        return f"called in {self.call_site.said(in_backward=self.in_backward)}"


Key = tuple[Any, str, tuple[torch.dtype, ...]]  # operator, kind of device, dtypes of its tensors


class SoftPlacement(OperatorMode):
    """Within a ``with`` block operators without a kernel run on the CPU.

    Nothing is run twice that writes: where an operator failed that may have begun to, the error is
    raised, and ``known`` has it. Who is inside the block begins anew.

    Args:
        known: operators without a kernel; what is found is added.
        stream: the shard's.
        call_sites: finds who calls. Without it the error of what is not known is raised: it is
            known only if it is looked for.
        runs: whether they run on the CPU; else they are found, and their error is raised.
    """

    def __init__(
        self,
        known: dict[Key, Lacking],
        stream: Stream,
        call_sites: CallSites | None = None,
        *,
        runs: bool = True,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.failed: Lacking | None = None  # whose error was raised
        self.stuck = ""  # why it did not run on the CPU
        self.is_unfinished = False  # it was not, as it had begun to write
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
            self.failed = Lacking(func.name().partition(".")[0], device, *call_site)
            if not self._runs or device == CPU:
                raise
            if (why := _never(func, args, kwargs)) is not None:
                self.stuck = why
                raise
            self._known[_key(func, args, kwargs)] = self.failed
            self._operators.add(func)
            writes = any(written for _, written, _ in arguments(func, args, kwargs))
            if writes and is_composite(func, device):
                self.is_unfinished = True  # one of the operators that it is made of is lacking
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
    """Return why an operator cannot run on the CPU, if so."""
    if func.is_view or torch.Tag.inplace_view in func.tags:
        return "what it returns shares memory with what it is given"
    given = leaves((args, kwargs))
    if any(isinstance(value, torch.Generator) and value.device != CPU for value in given):
        return "it draws from a generator of the device"
    return None


def _drawing(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], stream: Stream
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments, with the shard's stream for a generator where none is given."""
    for number, argument in enumerate(schema_arguments(func)):
        if argument.name == "generator":
            given = args[number] if number < len(args) else kwargs.get("generator")
            return args[:number], {**kwargs, "generator": given or stream.generator}
    return args, kwargs


def _key(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Key:
    dtypes = tuple(tensor.dtype for tensor in tensors((args, kwargs)))
    return func, _device(args, kwargs).type, dtypes


def _device(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.device:
    """Return the device that an operator runs on: that of its first argument not on the CPU."""
    for value in leaves((args, kwargs)):
        device = value.device if isinstance(value, torch.Tensor) else value
        if isinstance(device, torch.device) and device != CPU:
            return device
    return CPU
