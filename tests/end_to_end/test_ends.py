"""The end of a run beside signals: no process outlives a run, nothing is left or delays the end."""

import os
import signal
import time
from pathlib import Path

import pytest
from support.runs import LIMIT_S, command, last_json, processes_of, soon, started, wait_for

in_proc = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks into /proc")

AT_ONCE_S = 10.0  # the limit for an end after a second signal
WORKERS = ("--workers", "2")


@in_proc
@pytest.mark.slow
def test_nobody_outlives_a_run_that_is_killed_while_its_fork_server_starts(tmp_path: Path) -> None:
    before = set(Path("/dev/shm").iterdir())
    # In a fork, nobody would be met while he imports torch.
    words = command("lasting.py", options=WORKERS)
    with started(tmp_path, words, from_nothing=True) as (run, mark):
        wait_for(run, "16 rows = ")
        soon(lambda: len(processes_of(mark)) >= 2)
        time.sleep(0.5)
        run.kill()
        run.wait()
        soon(lambda: not processes_of(mark))  # each is told by the kernel
    assert not [path for path in set(Path("/dev/shm").iterdir()) - before if path.exists()]


@in_proc
@pytest.mark.slow
def test_loops_leave_nothing(tmp_path: Path) -> None:
    before = set(Path("/dev/shm").iterdir())
    with started(tmp_path, command("lasting.py", "loops=4", options=WORKERS)) as (run, mark):
        said, _ = run.communicate(timeout=LIMIT_S)
        assert run.returncode == 0, said
        assert not processes_of(mark)
        left = {path.name for path in (tmp_path / "temporary").iterdir()}
    found = last_json(said)
    assert [each["children"] for each in found] == [0] * 4
    # The first loop's parameters are in shared memory as long as the model is there.
    assert all(each["files"] <= found[0]["files"] for each in found), found
    assert len({each["files"] for each in found[1:]}) == 1, found
    assert said.count("computes on towers") == 1  # a notice is said once
    assert set(Path("/dev/shm").iterdir()) <= before
    assert all(name.startswith("torchinductor_") for name in left), left  # made by importing torch


@in_proc
@pytest.mark.slow
def test_a_closed_terminal_means_nothing_to_nohup(tmp_path: Path) -> None:
    words = ["nohup", *command("lasting.py", "updates=40", "pause=0.03", options=WORKERS)]
    with started(tmp_path, words) as (run, mark):
        said = wait_for(run, "step 4/")
        for pid in processes_of(mark):
            os.kill(pid, signal.SIGHUP)
        rest, _ = run.communicate(timeout=LIMIT_S)
        assert run.returncode == 0, said + rest
    assert "came to step 40" in rest


@in_proc
@pytest.mark.slow
@pytest.mark.parametrize("signals", [2, 3])
def test_a_second_signal_ends_whatever_the_run_is_blocked_in(tmp_path: Path, signals: int) -> None:
    with started(tmp_path, command("lasting.py", "stuck=3", options=WORKERS)) as (run, mark):
        wait_for(run, "stuck")
        for number in [signal.SIGTERM, signal.SIGINT, signal.SIGTERM][:signals]:
            run.send_signal(number)
            time.sleep(0.3)
        began = time.monotonic()
        # The run has AT_ONCE_S to end by itself after the second signal, and none after the third.
        code = run.wait(timeout=AT_ONCE_S + 20)
        assert code == (130 if signals == 2 else 143)
        assert (time.monotonic() - began >= AT_ONCE_S - 1) == (signals == 2)
        assert run.stdout is not None
        assert "again, stopped at once" in run.stdout.read()
        soon(lambda: not processes_of(mark))
