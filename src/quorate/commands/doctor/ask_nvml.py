"""GPUs as seen by the driver's library (NVML). Runs in a separate process; see ``ask``.

Imports nothing of quorate, which would import torch first.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import combinations
from typing import Any

# The levels of nvmlDeviceGetTopologyCommonAncestor.
_ANCESTORS = {
    0: "one board",
    10: "one PCIe switch",
    20: "several PCIe switches",
    30: "one host bridge",
    40: "one NUMA node",
    50: "two NUMA nodes",
}
_COMPUTE_MODES = {0: "shared", 1: "exclusive", 2: "prohibited", 3: "exclusive"}
_P2P_READ, _P2P_NVLINK, _P2P_OK = 0, 2, 0


def run() -> None:
    """Print a line of JSON before each question, one for each answer, and one at the end."""
    _ask()
    _say(end=True)


def _ask() -> None:
    _say(asking="the NVIDIA driver")
    try:
        import pynvml as nvml
    except ImportError:
        _say(error="nvidia-ml-py is not installed: pip install 'quorate-torch[nvml]'")
        return
    try:
        nvml.nvmlInit()
    except Exception as error:  # the edge of a process: no library, no driver, no permission
        _say(error=str(error))
        return
    ask = _NvmlQueries(nvml)
    cuda = ask(nvml.nvmlSystemGetCudaDriverVersion_v2)
    _say(
        driver={
            "version": ask(nvml.nvmlSystemGetDriverVersion),
            "cuda": None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
        }
    )
    handles = []
    for index in range(nvml.nvmlDeviceGetCount()):
        _say(asking=f"GPU {index}")
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid = nvml.nvmlDeviceGetUUID(handle)
        except nvml.NVMLError as error:  # lost, or another user's
            _say(lost={"index": index, "error": str(error)})
            continue
        handles.append((index, handle))
        _say(gpu={"index": index, "uuid": uuid, **_gpu(nvml, ask, handle)})
    for (index, handle), (peer, peer_handle) in combinations(handles, 2):
        _say(asking=f"the link between GPUs {index} and {peer}")
        _say(link={"one": index, "other": peer, **_link(nvml, ask, handle, peer_handle)})
    _say(asking="the NVIDIA driver to be left alone")
    ask(nvml.nvmlShutdown)


class _NvmlQueries:
    """Calls that return None if the library refuses: not every GPU supports every query."""

    def __init__(self, nvml: Any) -> None:
        self._refusals = (nvml.NVMLError, nvml.NVMLLibraryMismatchError, AttributeError)

    def __call__(self, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except self._refusals:
            return None


def _gpu(nvml: Any, ask: _NvmlQueries, handle: Any) -> dict[str, Any]:
    memory = ask(nvml.nvmlDeviceGetMemoryInfo, handle)
    rates = ask(nvml.nvmlDeviceGetUtilizationRates, handle)
    mig = ask(nvml.nvmlDeviceGetMigMode, handle)
    is_cut = bool(mig and mig[0])
    links = 0
    while ask(nvml.nvmlDeviceGetNvLinkState, handle, links):
        links += 1
    return {
        "name": ask(nvml.nvmlDeviceGetName, handle),
        "memory_bytes": None if memory is None else memory.used,
        "memory_total_bytes": None if memory is None else memory.total,
        "use": None if rates is None else rates.gpu / 100,
        "compute_mode": _COMPUTE_MODES.get(ask(nvml.nvmlDeviceGetComputeMode, handle)),
        "nvlinks": links,
        "is_cut": is_cut,
        "slices": _slices(nvml, ask, handle) if is_cut else [],
        "holders": [
            {"pid": process.pid, "memory_bytes": process.usedGpuMemory}
            for process in ask(nvml.nvmlDeviceGetComputeRunningProcesses, handle) or []
        ],
    }


def _slices(nvml: Any, ask: _NvmlQueries, handle: Any) -> list[dict[str, Any]]:
    slices = []
    for index in range(ask(nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
        part = ask(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, index)
        if part is not None:
            slices.append(
                {
                    "uuid": ask(nvml.nvmlDeviceGetUUID, part),
                    "gpu_instance": ask(nvml.nvmlDeviceGetGpuInstanceId, part),
                    "compute_instance": ask(nvml.nvmlDeviceGetComputeInstanceId, part),
                }
            )
    return slices


def _link(nvml: Any, ask: _NvmlQueries, handle: Any, peer: Any) -> dict[str, Any]:
    nvlink = ask(nvml.nvmlDeviceGetP2PStatus, handle, peer, _P2P_NVLINK) == _P2P_OK
    read = ask(nvml.nvmlDeviceGetP2PStatus, handle, peer, _P2P_READ)
    ancestor = ask(nvml.nvmlDeviceGetTopologyCommonAncestor, handle, peer)
    return {
        "kind": "NVLink" if nvlink else _ANCESTORS.get(ancestor, "unknown"),
        "is_direct": None if read is None else read == _P2P_OK,
    }


def _say(**line: Any) -> None:
    print(json.dumps(line), flush=True)
