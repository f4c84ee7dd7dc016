"""NVML of a machine with two GPUs, the first with a slice, and with a lost GPU."""

import os
from types import SimpleNamespace
from typing import Any

GPUS = {"GPU-aaaa": 0, "GPU-bbbb": 1}
SLICE = "MIG-cccc"
IN_MODULE = f"import sys\nfrom {__name__} import Nvml\nsys.modules['pynvml'] = Nvml()\n"


class Nvml(SimpleNamespace):
    """A substitute for the module ``pynvml``; the handle of a GPU is the GPU's UUID."""

    def __init__(self) -> None:
        super().__init__(
            users=0,
            looked_up=[],
            NVMLError=LookupError,
            NVMLLibraryMismatchError=LookupError,
            nvmlInit=lambda: self.count(1),
            nvmlShutdown=lambda: self.count(-1),
            nvmlSystemGetDriverVersion=lambda: "580.65.06",
            nvmlSystemGetCudaDriverVersion_v2=lambda: 13000,
            nvmlDeviceGetCount=lambda: 3,
            nvmlDeviceGetHandleByIndex=lambda index: self.look_up([*GPUS, "GPU-dddd"][index]),
            nvmlDeviceGetHandleByUUID=self.look_up,
            nvmlDeviceGetDeviceHandleFromMigDeviceHandle=lambda _: "GPU-aaaa",
            nvmlDeviceGetUUID=lambda handle: handle,
            nvmlDeviceGetIndex=GPUS.__getitem__,
            nvmlDeviceGetName=lambda _: "NVIDIA H200",
            nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(total=141 << 30, used=10 << 30),
            nvmlDeviceGetUtilizationRates=dict.fromkeys(GPUS, SimpleNamespace(gpu=87)).__getitem__,
            nvmlDeviceGetMigMode={}.__getitem__,
            nvmlDeviceGetComputeMode=lambda _: 0,
            nvmlDeviceGetNvLinkState=lambda _, link: ([1] * 18)[link],
            nvmlDeviceGetComputeRunningProcesses=self.running,
            nvmlDeviceGetP2PStatus=lambda *_: 0,
            nvmlDeviceGetTopologyCommonAncestor=lambda *_: 50,
        )

    def count(self, users: int) -> None:
        self.users += users

    def look_up(self, uuid: str) -> str:
        self.looked_up.append(uuid)
        if uuid not in (*GPUS, SLICE):
            raise LookupError("GPU is lost")
        return uuid

    def running(self, handle: str) -> list[Any]:
        """Return this process, its parent, and a foreign process, on the second GPU."""
        sizes = {os.getpid(): 9000 << 20, os.getppid(): 20_000 << 20, 2**22 + 7: None}
        on_it = sizes if handle == "GPU-bbbb" else {}
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in on_it.items()]
