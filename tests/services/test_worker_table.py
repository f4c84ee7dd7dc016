"""Facts about workers, by hand numbers: use and memory of devices, cells, slow workers.

White-box: no run of a test has GPUs, or lasts the minutes until a slow worker is named again.
"""

import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.nvml import Nvml

from quorate.engines.worker_status import PHASES, WorkerStatus
from quorate.services.device_use import DeviceGauges, DeviceUse
from quorate.services.display.display import WorkerRows, plain
from quorate.services.display.straggler import CopiedShards, SlowWorkers, Stragglers

MIB, GIB = 1 << 20, 1 << 30


def status(number: int, shards: int = 5, **fields: Any) -> WorkerStatus:
    """Return a status; names of phases are seconds spent there."""
    spent = {name: fields.pop(name, 0.0) for name in PHASES}
    made = WorkerStatus(number, f"cuda:{number}", 1, None, "waiting", 0, 0, 0.0, spent, shards)
    return made._replace(**fields)


# --- devices --------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="clocks of other processes are Linux's")
def test_processes_and_threads_are_measured_until_they_are_gone() -> None:
    over, gauges = threading.Event(), DeviceGauges()
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    waiting = threading.Thread(target=over.wait)
    waiting.start()
    workers = [
        status(0, device="cpu", pid=busy.pid),
        status(1, device="cpu", pid=None),
        status(2, device="cpu", pid=None, thread=threading.get_native_id()),
        status(3, device="cpu", pid=None, thread=waiting.native_id),
    ]
    try:
        first, _ = gauges.read(workers)
        until = time.monotonic() + 0.4
        while time.monotonic() < until:  # this thread computes
            pass
        (process, nobody, computing, idle), host = gauges.read(workers)
    finally:
        busy.kill()
        busy.wait()
        over.set()
        waiting.join()
    assert [use.use for use in first] == [None] * 4  # there is no interval yet
    assert 0.01 < process.use < 1.2  # of a core, perhaps shared
    assert 1 << 20 < process.memory_bytes < GIB
    assert nobody == DeviceUse(1, "cpu", None, None, None, None)
    assert 0.01 < computing.use < 1.2
    assert computing.memory_bytes is None  # all workers are in one process
    assert idle.use < 0.05
    assert 0 < host.cpu <= 1
    assert 0 < host.memory_bytes < host.memory_total_bytes
    gone, _ = gauges.read(workers[:2])
    assert [use.use for use in gone] == [None] * 2
    gauges.close()


def test_gpus_are_found_by_uuid_and_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml, gauges = Nvml(), DeviceGauges()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    uuids = ["bbbb", "cccc", "dddd"]
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda i: SimpleNamespace(uuid=uuids[i])
    )
    workers = [status(n) for n in range(3)]
    nothing = [DeviceUse(n, f"cuda:{n}", None, None, None, None) for n in range(3)]
    for _ in range(2):
        uses, _ = gauges.read(workers)
        assert uses == [
            DeviceUse(0, "cuda:0", "physical 1", 0.87, 10 * GIB, 141 * GIB),
            DeviceUse(1, "cuda:1", "physical 0", None, 10 * GIB, 141 * GIB),
            nothing[2],  # a worker unknown to NVML
        ]
    assert nvml.looked_up == ["GPU-bbbb", "GPU-cccc", "MIG-cccc", "GPU-dddd", "MIG-dddd"]
    assert nvml.users == 1
    for _ in range(2):
        gauges.close()
    assert nvml.users == 0
    assert gauges.read(workers)[0] == nothing


# --- cells of the table ---------------------------------------------------------------------------


def rows(*workers: WorkerStatus, uses: Any = (), table: WorkerRows | None = None) -> list[Any]:
    return [*(table or WorkerRows()).rows(workers, uses, 100.0)]


def test_cells_of_the_table() -> None:
    uses = [
        DeviceUse(0, "cuda:0", "physical 3", 0.87, 2 * GIB, 80 * GIB),
        DeviceUse(1, "cpu", None, 0.97, 412 * MIB, None),
        DeviceUse(2, "cuda:2", None, 0.004, 1000 * MIB, 8 * GIB),
    ]
    first = status(0, 4, waiting=0.4, forward=0.8, since=99.5)
    found = rows(first, first._replace(number=1, device="cpu"), status(2, 0, since=99.5), uses=uses)
    assert found == [
        ("0", "cuda:0 = physical 3", "87%", "2.0 of 80 GiB", "0.20 s", "33%", "waiting"),
        ("1", "cpu", "1.0 core", "412 MiB", "0.20 s", "33%", "waiting"),
        ("2", "cuda:2", "0%", "1.0 of 8 GiB", "", "", "waiting"),
    ]
    assert plain([]) == "worker  device  use  memory  shard  waiting  state"
    # Figures are of the time since the last ones.
    table = WorkerRows()
    slower = status(0, 6, waiting=0.6, forward=3.2)
    idle = slower._replace(seconds=slower.seconds | {"waiting": 5.6})
    shown = [rows(each, table=table)[0][4:6] for each in (first, slower, idle)]
    assert shown == [("0.20 s", "33%"), ("1.20 s", "8%"), ("1.20 s", "100%")]
    assert rows(status(0, since=60.0))[0][6] == "waiting for 40 s"


# --- slow workers ---------------------------------------------------------------------------------


class Watched:
    """Workers looked at every 5 s; each takes 0.08 s backward, and a time forward."""

    def __init__(self) -> None:
        self.slow_ones = SlowWorkers()
        self.said: dict[int, list[str]] = {}
        self._now, self._shards = 0, 2
        self._spent: list[float] = []

    def look(self, *forward_s: float, until: int) -> list[str]:
        self._spent = self._spent or [2 * each for each in forward_s]
        for now in range(self._now, until, 5):
            self._shards += 20
            both = zip(self._spent, forward_s, strict=True)
            self._spent = [spent + 20 * each for spent, each in both]
            seen = [
                status(n, self._shards, forward=s, backward=0.08 * self._shards)
                for n, s in enumerate(self._spent)
            ]
            if lines := self.slow_ones.named(seen, now):
                self.said[now] = lines
        self._now = until
        return [line for lines in self.said.values() for line in lines]

    def summary(self) -> str | None:
        return Stragglers(self.slow_ones, CopiedShards()).summary()


@pytest.mark.parametrize(
    ("forward_s", "said"),
    [
        (
            (0.1, 0.1, 0.21),
            "worker 2 (cuda:2) is slow: 0.29 s a shard, 1.6 times the median of 0.18 s; "
            "in forward: 0.21 s against 0.10 s",
        ),
        (
            (0.1, 3.1),  # of two workers the line names the second
            "worker 1 (cuda:1) is slow: 3.18 s a shard, 17.7 times worker 0's 0.18 s; "
            "in forward: 3.10 s against 0.10 s",
        ),
        ((0.1, 0.1, 0.15), None),  # 1.28 times the median
        ((5.0,), None),
    ],
)
def test_a_slow_worker_is_named_once_with_its_phase(
    forward_s: tuple[float, ...], said: str | None
) -> None:
    watched = Watched()
    assert watched.look(*forward_s, until=600) == [said] * (said is not None)
    summary = str(watched.summary())
    assert (summary != "None") == (said is not None)
    if said is not None:
        assert f"{max(forward_s) + 0.08:.2f} s for a shard" in summary
        assert summary.endswith("(in 119 of 119 measurements)")


def test_it_is_named_again_when_it_is_twice_as_slow_and_when_it_is_over() -> None:
    watched = Watched()
    for forward_s, until in ((0.21, 100), (0.40, 200), (0.60, 300), (0.10, 500)):
        watched.look(0.1, 0.1, forward_s, until=until)  # 1.6, 2.7, 3.8 times the rest, and 1
    assert [*watched.said] == [5, 200, 355]
    assert "3.8 times the median" in watched.said[200][0]
    assert watched.said[355] == ["worker 2 (cuda:2) is no longer slow"]
