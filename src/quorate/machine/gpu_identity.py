"""The identity of a torch device's GPU, regardless of visibility: nvidia-smi's number, UUID."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing, suppress
from typing import Any, NamedTuple

import torch

from quorate.machine.visible_devices import VisibleGpu


class GpuHandle(NamedTuple):
    """A GPU found by the driver's library."""

    handle: Any  # NVML's handle of the GPU or of its slice
    visible: VisibleGpu


class Nvml:
    """The driver's library, opened read-only. Call ``close`` at the end.

    Needs a driver and the package nvidia-ml-py of the extra ``nvml``; otherwise ``module`` is None,
    and no GPU is found.
    """

    def __init__(self) -> None:
        self.module: Any = None
        self._pynvml: Any = None
        with suppress(ImportError):
            import pynvml  # only where there is a GPU

            self._pynvml = pynvml
        if self._pynvml is None:
            return
        with self.unless_it_fails():
            pynvml.nvmlInit()
            self.module = pynvml

    @property
    def is_installed(self) -> bool:
        """True if the package nvidia-ml-py is installed."""
        return self._pynvml is not None

    def find(self, name: str) -> GpuHandle | None:
        """Return the GPU with a torch name, or None if unknown.

        Searches by UUID: torch numbers GPUs differently if CUDA_VISIBLE_DEVICES hides or reorders
        GPUs.
        """
        nvml = self.module
        if nvml is None:
            return None
        try:
            uuid = uuid_of(torch.device(name))
        except RuntimeError:
            uuid = None  # torch knows no such device
        if uuid is None:
            return None  # callers report the lack
        with self.unless_it_fails():
            handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            return GpuHandle(handle, VisibleGpu(nvml.nvmlDeviceGetIndex(handle), f"GPU-{uuid}"))
        with self.unless_it_fails():
            handle = nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")
            whole = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
            return GpuHandle(handle, VisibleGpu(nvml.nvmlDeviceGetIndex(whole), f"MIG-{uuid}"))
        return None

    def unless_it_fails(self) -> suppress:
        """Return a context that skips the rest of a block when NVML fails."""
        pynvml = self._pynvml
        if pynvml is None:
            return suppress(OSError)
        return suppress(pynvml.NVMLError, pynvml.NVMLLibraryMismatchError, OSError)

    def close(self) -> None:
        """Close the driver's library; no GPU is found afterwards."""
        if self.module is not None:
            self.module = None
            with self.unless_it_fails():
                self._pynvml.nvmlShutdown()


def uuid_of(device: torch.device) -> str | None:
    """Return the UUID of a GPU, the same in all processes; None if torch reports no UUID."""
    if device.type != "cuda":  # only CUDA reports a UUID
        return None
    try:
        index = torch.cuda.current_device() if device.index is None else device.index
        return str(torch.cuda.get_device_properties(index).uuid)
    except (AssertionError, AttributeError, RuntimeError):
        return None  # torch has no CUDA, or no such device


def mapping(devices: Sequence[torch.device]) -> list[str]:
    """Return ``cuda:0 = physical 4 = GPU-...`` for each distinct GPU among the devices.

    Without the package nvidia-ml-py, the only line names the extra that installs the package.
    """
    names = dict.fromkeys(str(device) for device in devices if device.type == "cuda")
    if not names:
        return []
    with closing(Nvml()) as nvml:
        if not nvml.is_installed:
            fix = "pip install 'quorate-torch[nvml]'"
            return [f"numbers, use and memory of GPUs need nvidia-ml-py, which is missing: {fix}"]
        found = {name: nvml.find(name) for name in names}
    return [f"{name} = {gpu.visible}" for name, gpu in found.items() if gpu is not None]


def processes(device: torch.device) -> list[tuple[int, int | None]]:
    """Return the processes on a GPU: the driver's process number, and the bytes of each."""
    with closing(Nvml()) as nvml:
        found = nvml.find(str(device))
        if found is not None:
            with nvml.unless_it_fails():
                running = nvml.module.nvmlDeviceGetComputeRunningProcesses(found.handle)
                return [(process.pid, process.usedGpuMemory) for process in running]
    return []
