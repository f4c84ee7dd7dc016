"""Random numbers of accelerators: a replica seeds and restores only its own devices' generators.

An accelerator has a single generator, so replicas on the same accelerator compute their shards in
turn. Replicas on different accelerators compute at once, but ``torch.manual_seed`` and ``fork_rng``
affect the generators of all devices of the process: a call in the forward pass of a tower would
restart the random numbers of all towers in the middle of their shards.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, wraps
from types import TracebackType
from typing import Any

import torch

from quorate.coordination.keys import Seed, made
from quorate.machine.devices import Group

_local = threading.local()  # ``devices``: numbers of the devices of the thread's replica
_inside = [0]  # number of threads inside ``AloneOn``
_counting = threading.Lock()


class AloneOn:
    """A context with exclusive use of some devices. Waits for replicas on the same devices.

    The lock covers the queuing of kernels; on the CPU every thread has a stream of its own. The
    context may be entered repeatedly, but not nested.
    """

    def __init__(self, group: Group) -> None:
        # Replicas of several devices lock them in the same order; two stages may share a device.
        self._devices = sorted({device for device in group if device.type != "cpu"}, key=str)
        for kind in {device.type for device in self._devices}:
            _confine(kind)

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for device in self._devices:
                stack.enter_context(_lock_of(device))
            if self._devices:
                stack.enter_context(_own_generators({d.index or 0 for d in self._devices}))
            self._held = stack.pop_all()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._held.close()


def reseed_devices(group: Sequence[torch.device], seed: Seed) -> None:
    """Seed the generators of the accelerators of a replica."""
    for device in group:
        if device.type != "cpu":
            with torch.accelerator.device_index(device.index or 0):
                torch.get_device_module(device).manual_seed(made(seed))


@cache
def _lock_of(_device: torch.device) -> threading.Lock:
    return threading.Lock()


@contextmanager
def _own_generators(devices: Collection[int]) -> Iterator[None]:
    _local.devices = devices
    with _counting:
        _inside[0] += 1
    try:
        yield
    finally:
        with _counting:
            _inside[0] -= 1
        del _local.devices


def _own_devices() -> Collection[int] | None:
    """Return the devices whose generators the calling thread may set; None: all."""
    if not _inside[0]:
        return None
    # A thread of autograd has no devices set, and computes on its current device.
    return getattr(_local, "devices", None) or {torch.accelerator.current_device_index()}


@cache
def _confine(kind: str) -> None:
    """Restrict functions for all devices to the calling thread's devices, once per process."""
    module: Any = torch.get_device_module(kind)
    seed_all = getattr(module, "manual_seed_all", None)
    set_state = getattr(module, "set_rng_state", None)
    if seed_all is None or set_state is None:  # MPS has one device; others may lack a generator
        return

    @wraps(seed_all)
    def manual_seed_all(seed: int) -> None:
        own = _own_devices()
        if own is None:
            seed_all(seed)
            return
        for index in own:
            with torch.accelerator.device_index(index):
                module.manual_seed(seed)

    @wraps(set_state)
    def set_rng_state(new_state: torch.Tensor, device: Any = kind) -> None:
        own = _own_devices()
        index = device if isinstance(device, int) else torch.device(device).index
        if own is None or index is None or index in own:
            set_state(new_state, device)

    module.manual_seed_all, module.set_rng_state = manual_seed_all, set_rng_state
