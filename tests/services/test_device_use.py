"""Gauges: real processes and threads of this machine; GPUs by a stand-in for NVML."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from quorate.services.device_use import DeviceUse, Gauges
from quorate.transports.worker_status import WorkerStatus

GIB = 1 << 30
TICKS_S = 0.03  # times in /proc are in hundredths of a second


def worker(
    number: int, *, device: str = "cpu", pid: int | None = None, thread: int | None = None
) -> WorkerStatus:
    return WorkerStatus(number, device, pid, thread, "forward", 3, 1, 0.0, {}, 5)


class Spent(NamedTuple):
    """What a process has taken, in seconds."""

    wall_s: float
    cpu_s: float

    @classmethod
    def of(cls, pid: int) -> Spent:
        clock = (~pid << 3) | 2  # as clock_getcpuclockid(3) makes it
        return cls(time.monotonic(), time.clock_gettime(clock))

    def since(self, before: Spent) -> Spent:
        return Spent(self.wall_s - before.wall_s, self.cpu_s - before.cpu_s)


@pytest.mark.skipif(sys.platform != "linux", reason="clocks of other processes are Linux's")
def test_a_busy_process_and_one_that_is_gone() -> None:
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    workers = [worker(0, pid=busy.pid), worker(1, pid=None)]
    gauges = Gauges()
    try:
        outer = Spent.of(busy.pid)
        (first, nobody), _ = gauges.read(workers)
        inner = Spent.of(busy.pid)
        time.sleep(0.6)
        inner = Spent.of(busy.pid).since(inner)
        (second, _), host = gauges.read(workers)
        outer = Spent.of(busy.pid).since(outer)
        busy.kill()
        time.sleep(0.2)  # it has ended, and its parent has not looked yet
        (ended, _), _ = gauges.read(workers)
    finally:
        busy.kill()
        busy.wait()
    (gone, _), _ = gauges.read(workers)
    gauges.close()
    assert first.use is None  # there is no interval yet
    assert second.use is not None
    # The kernel's clock of the process says the same, from just before and from just after.
    assert (inner.cpu_s - TICKS_S) / outer.wall_s <= second.use
    assert second.use <= (outer.cpu_s + TICKS_S) / inner.wall_s
    assert second.use > 0
    assert second.memory_bytes is not None
    assert 1 << 20 < second.memory_bytes < GIB
    assert second.physical is second.memory_total_bytes is None
    assert 0 < host.cpu <= 1
    nothing = DeviceUse(0, "cpu", None, None, None, None)
    assert ended == gone == nothing
    assert nobody == nothing._replace(worker=1)


def test_towers_are_measured_by_their_threads() -> None:
    over = threading.Event()

    def compute() -> None:
        while not over.is_set():
            pass

    threads = [threading.Thread(target=compute), threading.Thread(target=over.wait)]
    gauges = Gauges()
    for thread in threads:
        thread.start()
    towers = [worker(n, thread=thread.native_id) for n, thread in enumerate(threads)]
    gauges.read(towers)
    time.sleep(0.6)
    (computing, waiting), _ = gauges.read(towers)
    over.set()
    for thread in threads:
        thread.join()
    deadline = time.monotonic() + 60
    while Path(f"/proc/self/task/{threads[0].native_id}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)  # the kernel's thread ends a little later than Python's
    (gone, _), _ = gauges.read(towers)
    assert computing.use is not None
    assert waiting.use is not None
    assert 0.1 < computing.use < 1.2  # of a core that it may have to share
    assert waiting.use < 0.1
    assert computing.memory_bytes is None  # it is all in one process
    assert gone.use is None


def test_the_host_is_within_bounds() -> None:
    gauges = Gauges()
    for _ in range(3):  # also when no time has passed
        devices, host = gauges.read([])
        assert devices == []
        assert 0 <= host.cpu <= 1
        assert 0 < host.memory_bytes < host.memory_total_bytes


def test_devices_that_cannot_be_asked_have_no_values() -> None:
    gauges = Gauges()
    names = ["cuda:97", "cuda:0+cuda:1", "mps"]  # with NVML or without
    uses, _ = gauges.read([worker(n, device=name) for n, name in enumerate(names)])
    gauges.close()
    gauges.close()
    assert uses == [DeviceUse(n, name, None, None, None, None) for n, name in enumerate(names)]


class StandIn:
    """NVML on a machine with two GPUs, of which the second is cut into slices."""

    class NVMLError(Exception):
        pass

    class NVMLLibraryMismatchError(Exception):
        pass

    def __init__(self) -> None:
        self.users = 0
        self.looked_up: list[str] = []

    def nvmlInit(self) -> None:  # noqa: N802
        self.users += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.users -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        self.looked_up.append(uuid)
        if uuid not in ("GPU-aaaa", "MIG-bbbb"):
            raise self.NVMLError
        return uuid

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: str) -> str:  # noqa: N802
        return "GPU-cccc"

    def nvmlDeviceGetIndex(self, handle: str) -> int:  # noqa: N802
        return {"GPU-aaaa": 3, "GPU-cccc": 1}[handle]

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:  # noqa: N802
        if handle.startswith("MIG"):
            raise self.NVMLError
        return SimpleNamespace(gpu=87, memory=40)

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:  # noqa: N802
        return SimpleNamespace(total=80 * GIB, free=70 * GIB, used=10 * GIB)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    monkeypatch.setitem(sys.modules, "pynvml", stand_in)
    uuids = ["aaaa", "bbbb", "dddd"]
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda i: SimpleNamespace(uuid=uuids[i])
    )
    return stand_in


def test_gpus_are_found_by_uuid_and_looked_up_once(nvml: StandIn) -> None:
    gauges = Gauges()
    workers = [worker(n, device=f"cuda:{n}", thread=1) for n in range(3)]
    for _ in range(2):
        uses, _ = gauges.read(workers)
        assert uses == [
            DeviceUse(0, "cuda:0", "physical 3", 0.87, 10 * GIB, 80 * GIB),
            DeviceUse(1, "cuda:1", "physical 1", None, 10 * GIB, 80 * GIB),
            DeviceUse(2, "cuda:2", None, None, None, None),  # of this one NVML knows nothing
        ]
    assert nvml.looked_up == ["GPU-aaaa", "GPU-bbbb", "MIG-bbbb", "GPU-dddd", "MIG-dddd"]
    assert nvml.users == 1
    gauges.close()
    gauges.close()
    assert nvml.users == 0
    uses, _ = gauges.read(workers[:1])
    assert uses == [DeviceUse(0, "cuda:0", None, None, None, None)]


def test_nvml_that_does_not_start_is_no_error(
    nvml: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise nvml.NVMLError

    monkeypatch.setattr(nvml, "nvmlInit", refuse)
    gauges = Gauges()
    uses, _ = gauges.read([worker(0, device="cuda:0")])
    gauges.close()
    assert uses == [DeviceUse(0, "cuda:0", None, None, None, None)]
