"""The use of workers' devices and of the host: read by NVML for GPUs, by psutil for the rest."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import psutil

from quorate.engines.worker_status import WorkerStatus
from quorate.machine.gpu_identity import GpuHandle, Nvml


class DeviceUse(NamedTuple):
    """The use of a worker's device."""

    worker: int
    device: str  # torch's name
    physical: str | None  # the GPU regardless of visibility: "physical 3"; None on a CPU
    use: float | None  # GPU: share of time with a kernel, 0 to 1; CPU: cores used by the worker
    memory_bytes: int | None  # GPU: used by all processes; CPU: resident, of the worker
    memory_total_bytes: int | None


class HostUse(NamedTuple):
    """The use of the host."""

    cpu: float  # share of all cores in use, 0 to 1
    memory_bytes: int  # in use
    memory_total_bytes: int


class DeviceGauges:
    """Gauges of devices and the host. Any thread may read; call ``close`` at the end.

    The use of a CPU is measured between two reads, by any caller: a caller with its own interval
    needs its own gauges. An unreadable value is None, never an exception: a worker may end at any
    moment, and NVML may not know a GPU.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spent: dict[Any, _CpuTimes] = {}  # by process or thread, at the previous read
        self._gpus: _GpuReadings | None = None

    def read(self, workers: Sequence[WorkerStatus]) -> tuple[list[DeviceUse], HostUse]:
        """Return the use of every worker's device, in the order of the workers, and of the host.

        Takes about 0.1 ms per worker on a CPU. The first value of a worker's CPU use is None.
        """
        with self._lock:
            spent, self._spent = self._spent, {}  # workers absent from this read are forgotten
            towers = any(worker.pid is None and worker.thread is not None for worker in workers)
            threads = _threads() if towers else {}
            uses = [self._use(worker, spent, threads) for worker in workers]
            return uses, _host_use()

    def close(self) -> None:
        """Close NVML. Later reads return no values of GPUs."""
        with self._lock:
            if self._gpus is not None:
                self._gpus.close()

    def _use(
        self, worker: WorkerStatus, spent: dict[Any, _CpuTimes], threads: dict[int, float]
    ) -> DeviceUse:
        nothing = DeviceUse(worker.number, worker.device, None, None, None, None)
        if worker.is_elsewhere:
            return nothing
        if worker.device.startswith("cuda"):  # NVML knows no other devices
            self._gpus = self._gpus or _GpuReadings()
            return self._gpus.use(nothing)
        if worker.device != "cpu":
            return nothing
        key: Any
        if worker.pid is not None:
            process = _process(worker.pid)
            if process is None:
                return nothing
            key, cpu_s, resident = process
        elif worker.thread in threads:
            key, cpu_s, resident = worker.thread, threads[worker.thread], None
        else:
            return nothing
        now = self._spent[key] = _CpuTimes(time.monotonic(), cpu_s)
        before = spent.get(key)
        cores = None if before is None else now.cores_since(before)
        return nothing._replace(use=cores, memory_bytes=resident)


class _CpuTimes(NamedTuple):
    """The CPU time used by a process or a thread so far."""

    at: float  # time.monotonic()
    cpu_s: float

    def cores_since(self, before: _CpuTimes) -> float | None:
        passed = self.at - before.at
        return (self.cpu_s - before.cpu_s) / passed if passed > 0 else None


def _host_use() -> HostUse:
    """Return the use of the host; of its cores, since the previous call in this thread."""
    try:
        cpu, memory = psutil.cpu_percent() / 100, psutil.virtual_memory()
    except OSError:  # there is no /proc
        return HostUse(0.0, 0, 0)
    return HostUse(cpu, memory.total - memory.available, memory.total)


def _process(pid: int) -> tuple[tuple[int, float], float, int] | None:
    """Return a process's identity, CPU seconds and resident bytes; None if the process is gone."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            times, resident = process.cpu_times(), process.memory_info().rss
            # The identity includes the start time: a new process may have the same number.
            which = (pid, process.create_time())
    except (psutil.Error, OSError):
        return None
    if not resident:
        return None  # a zombie: ended, and its parent has not waited for the process yet
    return which, times.user + times.system, resident


def _threads() -> dict[int, float]:
    """Return the CPU seconds of this process's threads, by the kernel's numbers."""
    try:
        threads = psutil.Process(os.getpid()).threads()
    except (psutil.Error, OSError):
        return {}
    return {thread.id: thread.user_time + thread.system_time for thread in threads}


class _GpuReadings:
    """The GPUs as seen by the driver."""

    def __init__(self) -> None:
        self._nvml = Nvml()
        self._gpus: dict[str, GpuHandle | None] = {}  # by torch's name

    def use(self, nothing: DeviceUse) -> DeviceUse:
        """Return the use of a GPU. Each value may be None on its own."""
        nvml, name = self._nvml.module, nothing.device
        if nvml is None:
            return nothing
        if name not in self._gpus:
            self._gpus[name] = self._nvml.find(name)
        gpu = self._gpus[name]
        if gpu is None:
            return nothing
        use = nothing._replace(physical=f"physical {gpu.visible.index}")
        with self._nvml.unless_it_fails():  # a slice of a GPU (MIG) has no utilization
            use = use._replace(use=nvml.nvmlDeviceGetUtilizationRates(gpu.handle).gpu / 100)
        with self._nvml.unless_it_fails():
            memory = nvml.nvmlDeviceGetMemoryInfo(gpu.handle)
            return use._replace(memory_bytes=memory.used, memory_total_bytes=memory.total)
        return use

    def close(self) -> None:
        self._nvml.close()
