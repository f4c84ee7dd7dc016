"""How much workers' devices and the host are used: NVML for GPUs, psutil for the rest."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import psutil

from quorate.engines.worker_status import WorkerStatus
from quorate.machine.gpu_identity import Found, Nvml


class DeviceUse(NamedTuple):
    """What a worker's device does."""

    worker: int
    device: str  # as torch names it
    physical: str | None  # which one it is whatever is visible: "physical 3"; None on a CPU
    use: float | None  # GPU: share of time with a kernel, 0 to 1; CPU: cores that the worker uses
    memory_bytes: int | None  # GPU: in use on it by anyone; CPU: resident, of the worker's process
    memory_total_bytes: int | None


class HostUse(NamedTuple):
    """What this machine does."""

    cpu: float  # share of all cores that is in use, 0 to 1
    memory_bytes: int  # in use
    memory_total_bytes: int


class Gauges:
    """What is used, to be read by any thread; ``close`` it.

    Use of a CPU is measured from one read to the next, whoever reads: who wants intervals of its
    own has gauges of its own. What cannot be read is None, never an exception: a worker may end at
    any moment, and a GPU may be one that NVML does not know.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spent: dict[Any, _Spent] = {}  # by process or thread, at the last read
        self._host = _host_times()
        self._host_cpu = 0.0
        self._gpus: _Gpus | None = None

    def read(self, workers: Sequence[WorkerStatus]) -> tuple[list[DeviceUse], HostUse]:
        """Return what every worker's device does, in their order, and the host.

        Takes some 0.1 ms per worker on a CPU. The first use of a CPU that a worker has is None.
        """
        with self._lock:
            spent, self._spent = self._spent, {}  # whoever is not read now is forgotten
            towers = any(worker.pid is None and worker.thread is not None for worker in workers)
            threads = _threads() if towers else {}
            uses = [self._use(worker, spent, threads) for worker in workers]
            return uses, self._host_use()

    def close(self) -> None:
        """Leave NVML. Reads after it are without GPUs."""
        with self._lock:
            if self._gpus is not None:
                self._gpus.close()

    def _use(
        self, worker: WorkerStatus, spent: dict[Any, _Spent], threads: dict[int, float]
    ) -> DeviceUse:
        nothing = DeviceUse(worker.number, worker.device, None, None, None, None)
        if worker.is_elsewhere:
            return nothing
        if worker.device.startswith("cuda"):  # NVML knows no others
            self._gpus = self._gpus or _Gpus()
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
        now = self._spent[key] = _Spent(time.monotonic(), cpu_s)
        before = spent.get(key)
        cores = None if before is None else now.cores_since(before)
        return nothing._replace(use=cores, memory_bytes=resident)

    def _host_use(self) -> HostUse:
        before, now = self._host, _host_times()
        if now.all_s > before.all_s:  # the kernel counts in hundredths of a second
            busy = (now.busy_s - before.busy_s) / (now.all_s - before.all_s)
            self._host, self._host_cpu = now, min(max(busy, 0.0), 1.0)
        try:
            memory = psutil.virtual_memory()
        except OSError:
            return HostUse(self._host_cpu, 0, 0)
        return HostUse(self._host_cpu, memory.total - memory.available, memory.total)


class _Spent(NamedTuple):
    """CPU time that a process or a thread has used so far."""

    at: float  # time.monotonic()
    cpu_s: float

    def cores_since(self, before: _Spent) -> float | None:
        passed = self.at - before.at
        return (self.cpu_s - before.cpu_s) / passed if passed > 0 else None


class _HostTimes(NamedTuple):
    """Seconds of all cores together, since the machine started."""

    busy_s: float
    all_s: float


def _host_times() -> _HostTimes:
    try:
        times = psutil.cpu_times()._asdict()
    except OSError:  # there is no /proc
        return _HostTimes(0.0, 0.0)
    for name in ("guest", "guest_nice"):  # Linux counts them in user and nice too
        times.pop(name, None)
    idle = times["idle"] + times.get("iowait", 0.0)
    return _HostTimes(sum(times.values()) - idle, sum(times.values()))


def _process(pid: int) -> tuple[tuple[int, float], float, int] | None:
    """Return which process it is, its CPU seconds, its resident bytes; None if it is gone."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            times, resident = process.cpu_times(), process.memory_info().rss
            # With the time at which it began: another may have the number by now.
            which = (pid, process.create_time())
    except (psutil.Error, OSError):
        return None
    if not resident:
        return None  # it has ended and nobody has waited for it yet
    return which, times.user + times.system, resident


def _threads() -> dict[int, float]:
    """Return the CPU seconds of this process's threads, by the kernel's numbers."""
    try:
        threads = psutil.Process(os.getpid()).threads()
    except (psutil.Error, OSError):
        return {}
    return {thread.id: thread.user_time + thread.system_time for thread in threads}


class _Gpus:
    """GPUs as the driver sees them."""

    def __init__(self) -> None:
        self._nvml = Nvml()
        self._gpus: dict[str, Found | None] = {}  # by torch's name

    def use(self, nothing: DeviceUse) -> DeviceUse:
        """Fill in what is known. Each of the values may be missing on its own."""
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
