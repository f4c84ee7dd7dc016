"""Switches that a process has once: a setting of any thread affects all threads.

A default dtype, the allowed attention kernels, oneDNN on or off: a temporary setting in a forward
pass applies to every tower of the process, and several towers may disturb each other.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from operator import call
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention import sdpa_kernel
from torch.overrides import TorchFunctionMode

from quorate.machine.devices import device_types
from quorate.replica.deterministic import refusals
from quorate.replica.precision import float32_backends, set_float32
from quorate.replica.quick.torch_calls import float32_reader, reader
from quorate.replica.shared.code import is_module_of, user_line
from quorate.replica.torch_internals import cache_parametrizations, parametrizations_are_cached

if TYPE_CHECKING:
    from quorate.replica.shared.code import Use

# Attention and products of CUDA have switches by its name; torch has none for all devices.
_cuda: Any = torch.backends.cuda
_cudnn: Any = torch.backends.cudnn
_mkldnn: Any = torch.backends.mkldnn
FLOAT32_ON_GPUS = "the precision of float32 on GPUs"


def _float32_on_gpus() -> tuple[str, ...]:
    return tuple(backend.fp32_precision for backend in float32_backends()[:3])


def _set_float32_on_gpus(values: Sequence[str]) -> None:
    set_float32([*values, *(backend.fp32_precision for backend in float32_backends()[3:])])


# Name -> reader and setter.
SWITCHES: Mapping[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "float32_matmul_precision": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    # After the switch above, which sets this too. TF32 is among the values.
    FLOAT32_ON_GPUS: (_float32_on_gpus, _set_float32_on_gpus),
    "deterministic algorithms": (
        torch.get_deterministic_debug_mode,
        torch.set_deterministic_debug_mode,
    ),
    "flash attention": (_cuda.flash_sdp_enabled, _cuda.enable_flash_sdp),
    "memory-efficient attention": (
        _cuda.mem_efficient_sdp_enabled,
        _cuda.enable_mem_efficient_sdp,
    ),
    "plain attention": (_cuda.math_sdp_enabled, _cuda.enable_math_sdp),
    "cuDNN's attention": (_cuda.cudnn_sdp_enabled, _cuda.enable_cudnn_sdp),
    "oneDNN": (lambda: _mkldnn.enabled, lambda on: _mkldnn.set_flags(on)),
    # Not by ``set_flags``, which also sets the precision of float32.
    "cuDNN": (lambda: _cudnn.enabled, lambda on: setattr(_cudnn, "enabled", on)),
    "the cache of parametrizations": (parametrizations_are_cached, cache_parametrizations),
    "cudnn.benchmark": (lambda: _cudnn.benchmark, lambda on: setattr(_cudnn, "benchmark", on)),
    "cudnn.deterministic": (
        lambda: _cudnn.deterministic,
        lambda on: setattr(_cudnn, "deterministic", on),
    ),
}
# Code on a CPU alone does not read these.
_OF_GPUS = {
    *(FLOAT32_ON_GPUS, "memory-efficient attention", "cuDNN's attention", "cuDNN"),
    *("cudnn.benchmark", "cudnn.deterministic"),
}
# The same for switches that torch reads by a single call: twice around every run of shards.
_CALLS = {
    "float32_matmul_precision": "_get_float32_matmul_precision",
    "flash attention": "_get_flash_sdp_enabled",
    "memory-efficient attention": "_get_mem_efficient_sdp_enabled",
    "plain attention": "_get_math_sdp_enabled",
    "cuDNN's attention": "_get_cudnn_sdp_enabled",
    "oneDNN": "_get_mkldnn_enabled",
    "cuDNN": "_get_cudnn_enabled",
    "cudnn.benchmark": "_get_cudnn_benchmark",
    "cudnn.deterministic": "_get_cudnn_deterministic",
}
_QUICK: Mapping[str, Callable[[], Any]] = {
    **{name: reader(SWITCHES[name][0], call) for name, call in _CALLS.items()},
    FLOAT32_ON_GPUS: float32_reader(_float32_on_gpus),
}
_SETTERS: tuple[object, ...] = (
    *(set_ for _, set_ in SWITCHES.values()),
    *(
        torch.set_num_threads,
        torch.use_deterministic_algorithms,
        torch.set_default_tensor_type,
        sdpa_kernel,
    ),
    *(value for name in ("sdp_kernel",) if (value := getattr(_cuda, name, None)) is not None),
)
_PARTS = ("flags", "set_flags")  # of a module of torch.backends

Settings = tuple[Any, ...]


def readers(*, has_gpu: bool) -> Mapping[str, Callable[[], Any]]:
    """Return functions that read the switches in use, by name."""
    return {
        name: _QUICK.get(name, read)
        for name, (read, _) in SWITCHES.items()
        if has_gpu or name not in _OF_GPUS
    }


@cache
def _readers() -> Mapping[str, Callable[[], Any]]:
    return readers(has_gpu=device_types() != ("cpu",))


def settings() -> Settings:
    """Return the positions of the switches in use: 1 us."""
    try:
        return tuple(map(call, _readers().values()))
    except RuntimeError:
        return tuple([_read(read) for read in _readers().values()])


def changed(before: Settings, after: Settings) -> list[str]:
    """Return the names of the switches that differ."""
    return [n for n, one, other in zip(_readers(), before, after, strict=True) if one != other]


def restore(wanted: Settings) -> None:
    """Restore the positions of the switches."""
    for name, value, now in zip(_readers(), wanted, settings(), strict=True):
        if value != now:
            SWITCHES[name][1](value)


def as_written(*, scripted: bool) -> AbstractContextManager[object]:
    """Return a context in which this thread runs scripted modules as written.

    Otherwise torch profiles them in their first runs, and then runs optimised code: the results
    would depend on the number of shards so far.
    """
    if scripted:
        jit: Any = torch.jit
        context: AbstractContextManager[object] = jit.optimized_execution(False)
        return context
    return nullcontext()


def of_a_shard(*, named: bool, scripted: bool) -> Callable[[], AbstractContextManager[object]]:
    """Return what makes a context for a shard that restores the thread's modes.

    Args:
        named: see ``refusals``.
        scripted: see ``as_written``.
    """
    return partial(_of_a_shard, named, scripted) if named or scripted else ThreadModes


@contextmanager
def _of_a_shard(named: bool, scripted: bool) -> Iterator[None]:
    with ThreadModes(), refusals(named=named), as_written(scripted=scripted):
        yield


class ThreadModes:
    """The calling thread's modes at construction, restored at the end of a block.

    User code that leaves gradients or autocast off would leave them off for later shards, but only
    for those on the same worker.
    """

    __slots__ = ("_autocast", "_gradients", "_threads")

    def __enter__(self) -> None:
        """Begin a block. The modes of the construction count."""

    def __exit__(self, *_: object) -> None:
        self.restore()

    def __init__(self) -> None:
        self._gradients, self._threads = torch.is_grad_enabled(), torch.get_num_threads()
        self._autocast = [*map(torch.is_autocast_enabled, device_types())]

    def restore(self) -> None:
        """Restore modes that differ: less than a microsecond, if none does."""
        if torch.is_grad_enabled() is not self._gradients:
            torch.set_grad_enabled(self._gradients)
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        kinds = device_types()
        if [*map(torch.is_autocast_enabled, kinds)] != self._autocast:
            for kind, is_on in zip(kinds, self._autocast, strict=True):
                torch.set_autocast_enabled(kind, is_on)


def setter_name(use: Use) -> str | None:
    """Return the name of a switch set by code, or None."""
    if any(use.value is setter for setter in _SETTERS):
        return use.name
    last = use.name.rpartition(".")[2]
    sets = use.is_written or last in _PARTS
    return use.name if sets and is_module_of(use.value, "torch.backends") else None


class SwitchWatch(TorchFunctionMode):
    """A context for a shard that is computed alone: notes the code that sets switches.

    Switches are compared whenever the thread calls a function of torch: a temporary setting is seen
    too.
    """

    def __init__(self) -> None:
        super().__init__()
        self._before = settings()
        self.found: list[str] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not self.found and (names := changed(self._before, settings())):
            frame: FrameType | None = sys._getframe(1)
            line = user_line(frame)
            self.found.append(f"{' and '.join(names)}{f' ({line})' * bool(line)}")
        return func(*args, **(kwargs or {}))


def _read(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except RuntimeError:  # torch's older and newer names of one switch disagree
        return None
