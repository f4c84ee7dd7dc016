"""The end of a run: nobody outlives it, nothing is left, a signal to all saves."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from support.runs import LIMIT_S, command, inspected, last_json, processes_of, started, wait_for

from quorate.training.stop import AT_ONCE_S
from quorate.transports.processes.starter import can_fork

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks into /proc"),
]


def workers_of(coordinator: int) -> list[int]:
    """Without their fork server."""
    found = children(coordinator)
    return [pid for server in found for pid in children(server)] if can_fork() else found


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(n) for task in tasks for n in (task / "children").read_text().split()]


@pytest.mark.parametrize("when", ["start", "computing", "holding"])
def test_nobody_outlives_a_coordinator_that_is_killed(tmp_path: Path, when: str) -> None:
    what = {"computing": "compute", "holding": "hold"}.get(when, when)
    before = set(Path("/dev/shm").iterdir())
    words = command("loops.py", what, options=("--workers", "2"))
    # In a fork, nobody would be met while he imports torch.
    with started(tmp_path, words, from_nothing=when == "start") as (run_, mark):
        wait_for(run_, when)
        deadline = time.monotonic() + 60
        # The coordinator, and a fork server that imports torch; then two workers, each with a
        # process that loads rows.
        while len(processes_of(mark)) < (2 if when == "start" else 5 + can_fork()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        if when == "start":
            time.sleep(0.5)
        else:
            os.kill(workers_of(run_.pid)[0], signal.SIGSTOP)
        run_.kill()
        killed_at = time.monotonic()
        run_.wait()
        while left := processes_of(mark):  # each is told by the kernel: none by a wait of its own
            assert time.monotonic() < killed_at + 60, left
            time.sleep(0.02)
    assert not [path for path in set(Path("/dev/shm").iterdir()) - before if path.exists()]


def test_loops_leave_nothing(tmp_path: Path) -> None:
    words = command("loops.py", "leave", "4", options=("--workers", "2"))
    before = set(Path("/dev/shm").iterdir())
    with started(tmp_path, words) as (run_, mark):
        assert run_.stdout is not None
        said = run_.stdout.read()
        assert run_.wait(timeout=LIMIT_S) == 0, said
        assert not processes_of(mark)
        left = {path.name for path in (tmp_path / "temporary").iterdir()}
    found = last_json(said)
    assert [each["children"] for each in found] == [0] * 4
    # The first loop's parameters are in shared memory as long as the model is there.
    assert all(each["files"] <= found[0]["files"] for each in found), found
    assert len({each["files"] for each in found[1:]}) == 1, found
    assert said.count("computes on towers") == 1  # a notice is said once
    assert set(Path("/dev/shm").iterdir()) <= before
    assert all(name.startswith("torchinductor_") for name in left), left  # torch's, by its import


SLOW = """
import sys, time, torch, quorate
from torch.utils.data import TensorDataset
def loss(model, batch):
    time.sleep(0.03)
    return model(batch[0]).square().mean()
torch.manual_seed(0)
trainer = quorate.Trainer(torch.nn.Linear(3, 1), loss, optimizer=torch.optim.Adam, batch_size=8,
    shards=4)
trainer.fit(TensorDataset(torch.ones(4000, 3)), epochs=2)
print("after fit")
"""


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_to_all_processes_ends_the_step_and_saves(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    script = tmp_path / "slow.py"
    script.write_text(SLOW)
    options = ("--workers", "2", "--run-dir", str(tmp_path / "run"))
    with started(tmp_path, command(script, options=options)) as (run_, mark):
        wait_for(run_, "step 1/")
        workers = workers_of(run_.pid)
        assert len(workers) == 2
        for pid in workers:  # to these alone it means nothing
            os.kill(pid, number)
        time.sleep(0.5)
        assert workers_of(run_.pid) == workers
        # A terminal sends Ctrl-C to its whole foreground group, a cluster SIGTERM to all.
        for pid in processes_of(mark):
            os.kill(pid, number)
        assert run_.stdout is not None
        said = run_.stdout.read()
        assert run_.wait(timeout=LIMIT_S) == code, said
        assert not processes_of(mark)
    assert f": {number.name}\n" in said
    assert "saved step" in said
    assert "Traceback" not in said
    assert "is starting" not in said
    assert "after fit" not in said
    assert 0 < inspected(tmp_path / "run")["global_step"] < 1000


def test_a_closed_terminal_means_nothing_to_nohup(tmp_path: Path) -> None:
    script = tmp_path / "slow.py"
    script.write_text(SLOW.replace("4000", "160"))
    words = ["nohup", *command(script, options=("--workers", "2"))]
    with started(tmp_path, words) as (run_, mark):
        said = wait_for(run_, "step 1/")
        for pid in processes_of(mark):
            os.kill(pid, signal.SIGHUP)
        assert run_.stdout is not None
        said += run_.stdout.read()
        assert run_.wait(timeout=LIMIT_S) == 0, said
    assert "after fit" in said


STUCK = """
import ctypes, os, sys, torch, quorate
from torch.utils.data import TensorDataset
libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
class Stuck(quorate.Callback):
    def updated(self, report):
        if report.global_step == 3:
            print("stuck", flush=True)
            for _ in range(2):  # no signal ends this, and no handler is called meanwhile
                libc.pthread_mutex_lock(mutex)
torch.manual_seed(0)
trainer = quorate.Trainer(torch.nn.Linear(3, 1), lambda m, b: m(b[0]).mean(),
    optimizer=torch.optim.Adam, batch_size=8, shards=2)
trainer.fit(TensorDataset(torch.ones(400, 3)), epochs=2, callbacks=[Stuck()])
"""


@pytest.mark.parametrize("signals", [2, 3])
def test_a_second_signal_ends_whatever_the_run_is_blocked_in(tmp_path: Path, signals: int) -> None:
    script = tmp_path / "stuck.py"
    script.write_text(STUCK)
    with started(tmp_path, command(script, options=("--workers", "2"))) as (run_, mark):
        wait_for(run_, "stuck")
        for number in [signal.SIGTERM, signal.SIGINT, signal.SIGTERM][:signals]:
            run_.send_signal(number)
            time.sleep(0.3)
        began = time.monotonic()
        # It has AT_ONCE_S to end by itself after the second, and none after the third.
        code = run_.wait(timeout=AT_ONCE_S + 20)
        assert code == (130 if signals == 2 else 143)
        assert (time.monotonic() - began >= AT_ONCE_S - 1) == (signals == 2)
        assert run_.stdout is not None
        assert "again, stopped at once" in run_.stdout.read()
        deadline = time.monotonic() + 60
        while processes_of(mark) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not processes_of(mark)
