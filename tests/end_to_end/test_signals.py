"""Every signal to every process of a run: the outcome that is promised, and nothing is left."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from support.runs import LIMIT_S, command, processes_of, started, wait_for

from quorate.transports.processes.starter import can_fork

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks into /proc"),
    pytest.mark.skipif(not can_fork(), reason="there is no fork server on this system"),
]

SCRIPT = """
import sys, time, torch, quorate
from torch.utils.data import Dataset
class Rows(Dataset):
    def __len__(self):
        return 96
    def __getitem__(self, row):
        return torch.randn(3) + row / 96
def loss(model, batch):
    time.sleep(0.02)
    return model(batch).square().mean()
class Says(quorate.Callback):
    def updated(self, report):
        if report.global_step == 4:
            print("under way", flush=True)
trainer = quorate.Trainer(torch.nn.Linear(3, 1), loss, optimizer=torch.optim.Adam, batch_size=8,
    shards=4, loading=quorate.Loading(processes=1))
trainer.fit(Rows(), epochs=4, callbacks=[Says()])
print("to the end")
"""

ASKS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
ENDS = [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGQUIT]
ALL = [*ASKS, *ENDS, signal.SIGUSR1, signal.SIGPIPE]
PROCESSES = ("coordinator", "server", "worker", "loader")


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(n) for task in tasks for n in (task / "children").read_text().split()]


def the_process(coordinator: int, which: str) -> int:
    pids = [coordinator]
    for _ in PROCESSES[: PROCESSES.index(which)]:
        pids = [child for pid in pids for child in children(pid)]
    return pids[0]


@pytest.mark.parametrize("which", PROCESSES)
@pytest.mark.parametrize("number", [*ALL, signal.SIGSTOP], ids=lambda number: number.name)
def test_a_signal(number: signal.Signals, which: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    options = ("--workers", "2", "--run-dir", str(tmp_path / "run"))
    before = set(Path("/dev/shm").iterdir())
    with started(tmp_path, command(tmp_path / "script.py", options=options)) as (run_, mark):
        said = wait_for(run_, "under way")
        os.kill(the_process(run_.pid, which), number)
        if number is signal.SIGSTOP:
            time.sleep(0.5)
            for pid in processes_of(mark):
                os.kill(pid, signal.SIGCONT)
        rest, _ = run_.communicate(timeout=LIMIT_S)
        said += rest
        deadline = time.monotonic() + 60
        while processes_of(mark) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not processes_of(mark)
        left = {path.name for path in (tmp_path / "temporary").iterdir()}
    expected = 0
    if which == "coordinator":
        expected = ASKS.get(number, -number if number in ENDS else 0)
    assert run_.returncode == expected, said
    assert ("to the end" in said) == (expected == 0), said
    if which == "coordinator" and number in ASKS:
        assert "saved step" in said
    assert {name for name in left if not name.startswith("torchinductor_")} == set()
    assert set(Path("/dev/shm").iterdir()) <= before
