"""One run trains in a run directory at a time, whoever else tries, and its death ends that."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from support.disks import disk, fill, tree
from support.messages import expect_error
from support.runs import Ended, command, inspected, run, started, wait_for
from support.small import DATA, trainer

import quorate
from quorate.errors import SettingError
from quorate.services import line_file, run_lock
from quorate.services.checkpoints import files
from quorate.services.report import Report
from quorate.services.run_lock import NAME, RunLock

TOWER = ("--engine", "towers", "--workers", "1")
# How often two runs are started in one directory.
PAIRS = int(os.environ.get("QUORATE_TEST_PAIRS", "4"))


def lasting(run_dir: Path, *arguments: str, options: tuple[str, ...] = TOWER) -> list[str]:
    return command("lasting.py", *arguments, options=(*options, "--run-dir", str(run_dir)))


def refused(lock: RunLock, owner: str = "") -> None:
    """Hold that another run has the directory.

    Args:
        owner: A pattern of the text that names the other run.
    """
    with pytest.raises(SettingError) as caught, lock.held(print):
        pass
    assert caught.value.name == "run_dir"
    assert re.search(owner, caught.value.fix)


# --- two runs -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_of_two_runs_at_random_distances_exactly_one_trains(tmp_path: Path) -> None:
    chance = random.Random(0)
    steps, seconds = 40, 0.05
    assert run(lasting(tmp_path / "alone", str(steps), "0")).code == 0
    digest = inspected(tmp_path / "alone")["digest"]
    for number in range(PAIRS):
        run_dir, begun = tmp_path / f"{number}", tmp_path / f"{number}-begun"
        begun.mkdir()
        words = lasting(run_dir, str(steps), str(seconds), str(begun))
        distance_s = chance.choice([0.0, chance.uniform(0.0, 0.05), chance.uniform(0.0, 1.5)])
        later = threading.Event()

        def second(words: list[str], later: threading.Event, distance_s: float) -> Ended:
            later.wait(distance_s)
            return run(words)

        with ThreadPoolExecutor(2) as pool:
            ended = [pool.submit(run, words), pool.submit(second, words, later, distance_s)]
            both = [one.result() for one in ended]
        assert sorted(one.code for one in both) == [0, 2], both
        [loser] = [one for one in both if one.code == 2]
        [pid] = [entry.name for entry in begun.iterdir()]  # one has made updates
        assert f"process {pid} on " in loser.err
        assert loser.err.count("\n") == 1
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        assert [line["global_step"] for line in lines] == list(range(1, steps + 1))
        assert inspected(run_dir)["digest"] == digest
        shutil.rmtree(run_dir)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["towers", "processes"])
def test_beside_a_running_run_others_are_refused_and_inspect_works(
    engine: str, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    options = ("--engine", engine, "--workers", "1", "--save-every-steps", "5")
    words = lasting(run_dir, "100000", "0.02", options=options)
    with started(tmp_path, words) as (process, _):
        wait_for(process, "step 8/")
        before = set(tree(run_dir))
        for more in ((), ("--fresh",)):
            refused = run(lasting(run_dir, "100000", "0.02", options=(*options, *more)))
            assert refused.code == 2
            assert f"process {process.pid} on " in refused.err
            assert refused.err.count("\n") == 1
        assert "aside-1" not in set(tree(run_dir)) | before
        assert inspected(run_dir)["global_step"] >= 5
        # Its death ends that, at once, whatever of it is still there.
        process.kill()
        process.wait()
        again = run(lasting(run_dir, "1", "0", options=TOWER))
        assert again.code == 0, again.err
        assert "nothing to do" in again.out


def test_two_trainers_of_one_process_are_two_runs(tmp_path: Path) -> None:
    first, second = trainer(tmp_path), trainer(tmp_path, fresh=True)
    updates = first.updates(DATA, steps=4)
    next(updates)
    first.save()  # it is ours already
    before = tree(tmp_path)
    for attempt in (
        lambda: second.fit(DATA, steps=2),
        lambda: next(second.updates(DATA, steps=2)),
    ):
        with expect_error(SettingError, name="run_dir"):
            attempt()
    assert tree(tmp_path) == before
    assert [report.global_step for report in updates] == [2, 3, 4]
    second.fit(DATA, steps=2)
    assert (tmp_path / "aside-1" / "checkpoints").is_dir()
    for steps in (3, 4):  # again, by the same trainer
        second.fit(DATA, steps=steps)
    assert second.global_step == 4
    third = trainer(tmp_path).updates(DATA, steps=9)
    next(third)
    with expect_error(SettingError, name="run_dir"):
        second.fit(DATA, steps=5)
    third.close()
    second.fit(DATA, steps=5)


def test_a_save_outside_of_a_loop_is_refused_while_another_run_trains(tmp_path: Path) -> None:
    first, second = trainer(tmp_path), trainer(tmp_path)
    for _ in first.updates(DATA, steps=2):
        pass
    updates = second.updates(DATA, steps=4)
    next(updates)
    with expect_error(SettingError, name="run_dir"):
        first.save()
    updates.close()
    assert first.save().is_dir()


# --- who holds it ---------------------------------------------------------------------------------

HOLDING = """
import os, sys, time
from pathlib import Path
from quorate.services.run_lock import RunLock
with RunLock(Path(sys.argv[1])).held(print):
    if (pid := os.fork()) == 0:  # as a loader process of towers is
        time.sleep(600)
    print(pid, flush=True)
    time.sleep(600)
"""


def is_free(run_dir: Path) -> bool:
    with suppress(SettingError), RunLock(run_dir).held(print):
        return True
    return False


def test_a_fork_that_outlives_the_run_does_not_hold_the_lock(tmp_path: Path) -> None:
    words = [sys.executable, "-c", HOLDING, str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        fork = int(process.stdout.readline())
        try:
            refused(RunLock(tmp_path), f"process {process.pid} on ")
            process.send_signal(signal.SIGKILL)
            process.wait()
            os.kill(fork, 0)  # it is still there
            deadline = time.monotonic() + 60
            while not is_free(tmp_path):  # it closes its copy when it comes to run
                assert time.monotonic() < deadline
        finally:
            process.kill()
            os.kill(fork, signal.SIGKILL)


def test_a_fork_does_not_release_the_lock_of_the_run(tmp_path: Path) -> None:
    with RunLock(tmp_path).held(print):
        if (pid := os.fork()) == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        refused(RunLock(tmp_path))


@pytest.mark.parametrize(
    "signature",
    [
        b"",
        b"no json",
        b"\xff\xfe\x00",
        b"[" * 4000,
        b"[]",
        b'{"pid": 1}',
        b'{"pid": "x", "host": 1, "since": []}',
        b'{"pid": -1, "host": "h", "since": 1}',
        b'{"pid": 1' + b"0" * 400 + b', "host": "h", "since": 1e999}',
    ],
)
def test_whatever_the_file_says_another_run_is_refused(
    signature: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lock, "OWNER_S", 0.05)
    with RunLock(tmp_path).held(print):
        (tmp_path / NAME).write_bytes(signature)
        refused(
            RunLock(tmp_path), rf"process {os.getpid()} .* has .*{NAME} locked; wait for its end"
        )


def test_the_name_of_a_host_does_not_reach_the_terminal_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lock, "_holders", lambda _: [])  # as for a run on another host
    with RunLock(tmp_path).held(print):
        forged = {"pid": 7, "host": "\x1b[2J" + "x" * 3000, "since": 0}
        (tmp_path / NAME).write_text(json.dumps(forged))
        with pytest.raises(SettingError) as caught, RunLock(tmp_path).held(print):
            pass
    assert "process 7 on \\x1b[2Jxxx" in caught.value.fix
    assert len(str(caught.value)) < 1000


def test_who_is_gone_is_not_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "OWNER_S", 0.05)
    with subprocess.Popen(["true"]) as gone:
        pass
    with RunLock(tmp_path).held(print):
        signature = json.loads((tmp_path / NAME).read_text())
        (tmp_path / NAME).write_text(json.dumps(signature | {"pid": gone.pid}))
        refused(RunLock(tmp_path), f"process {os.getpid()} ")
        monkeypatch.setattr(run_lock, "_holders", lambda _: [])  # as where nobody tells
        refused(RunLock(tmp_path), "another run does")


# --- who may lock it ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("folder", "file"), [(0o755, 0o600), (0o700, 0o600), (0o775, 0o660), (0o777, 0o666)]
)
@pytest.mark.parametrize("before", [None, 0o644, 0o666])
def test_who_may_not_write_to_a_directory_cannot_lock_it(
    folder: int, file: int, before: int | None, tmp_path: Path
) -> None:
    if before is not None:  # of an earlier version
        (tmp_path / NAME).touch()
        (tmp_path / NAME).chmod(before)
    tmp_path.chmod(folder)
    with RunLock(tmp_path).held(print):
        assert (tmp_path / NAME).stat().st_mode & 0o777 == file


@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="reads /proc/locks")
def test_who_has_the_lock_and_is_no_run_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``flock -x RUN_DIR/run.lock sleep 9999``, by whoever may open the file."""
    monkeypatch.setattr(run_lock, "OWNER_S", 0.05)
    with RunLock(tmp_path).held(print):
        pass
    code = "import fcntl, sys, time; file = open(sys.argv[1]); fcntl.flock(file, fcntl.LOCK_EX)"
    words = [sys.executable, "-c", f"{code}; print(flush=True); time.sleep(60)"]
    with subprocess.Popen([*words, str(tmp_path / NAME)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        refused(RunLock(tmp_path), rf"process {holder.pid} \(python.*, of user .*\) has .*{NAME}")
        holder.kill()
    with RunLock(tmp_path).held(print):
        pass


# --- where it cannot be ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["fifo", "directory", "link", "device"])
def test_something_else_in_its_place_is_refused_at_once(kind: str, tmp_path: Path) -> None:
    path = tmp_path / NAME
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if kind == "device" else tmp_path / "other")
    with expect_error(SettingError, name="run_dir"):
        trainer(tmp_path).fit(DATA, steps=1)
    assert not (tmp_path / "other").exists()


def test_a_file_system_without_locks_is_said_and_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import fcntl

    def none(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    run = trainer(tmp_path)
    run.fit(DATA, steps=2)
    assert run.global_step == 2
    out = capsys.readouterr().out
    assert out.count(f"{tmp_path} cannot be locked (No locks available)") == 1


def test_nfs_wants_a_file_that_is_open_for_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the client of Linux answers; the lock itself is real."""
    import fcntl

    real = fcntl.flock

    def as_on_nfs(descriptor: int, how: int) -> None:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")
        real(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", as_on_nfs)
    with RunLock(tmp_path).held(print):
        refused(RunLock(tmp_path))
    with RunLock(tmp_path).held(print):
        pass


def test_a_full_disk_has_a_lock_without_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lock, "OWNER_S", 0.05)
    with disk(tmp_path / "disk", "1m") as place:
        fill(place)
        with RunLock(place).held(print):
            refused(RunLock(place), f"process {os.getpid()} ")


# --- a directory that was removed -----------------------------------------------------------------


def test_what_is_made_again_in_the_place_of_a_directory_is_locked_again(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    first, second = RunLock(run_dir), RunLock(run_dir)
    with first.held(print):
        shutil.rmtree(run_dir)
        with pytest.raises(FileNotFoundError):
            first.renew()
        assert not run_dir.exists()
        run_dir.mkdir()
        first.renew()
        refused(second)
        shutil.rmtree(run_dir)
        first.renew(make=True)
        refused(second)
        # Another run was faster: it is that one's now.
        shutil.rmtree(run_dir)
        with second.held(print), expect_error(SettingError, name="run_dir"):
            first.renew(make=True)
        first.renew()
    with second.held(print):
        pass


def test_a_run_whose_directory_became_another_runs_writes_nothing_there(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    first, second = trainer(run_dir), trainer(run_dir)
    updates = first.updates(DATA, steps=6)
    next(updates)
    shutil.rmtree(run_dir)
    second.fit(DATA, steps=3)
    theirs = second.updates(DATA, steps=9)
    next(theirs)
    before = tree(run_dir)
    with expect_error(SettingError, name="run_dir"):
        first.save()
    assert tree(run_dir) == before
    theirs.close()
    updates.close()
    found = files.find(run_dir)
    assert found is not None
    assert found.record["global_step"] == 3


def test_the_log_of_a_run_whose_directory_became_another_runs_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(line_file, "LOOK_EVERY_S", 0.0)
    run_dir = tmp_path / "run"
    theirs = run_dir / "metrics.jsonl"

    class Taken(quorate.Callback):
        def updated(self, report: Report) -> None:
            if report.global_step == 2:
                shutil.rmtree(run_dir)
                self.other = RunLock(run_dir).held(print)
                self.other.__enter__()
                theirs.write_text("theirs\n")
            if report.global_step == 5:
                assert theirs.read_text() == "theirs\n"
                shutil.rmtree(run_dir)
                self.other.__exit__(None, None, None)

    run = trainer(run_dir, summary_every_s=None)
    run.fit(DATA, steps=8, callbacks=[Taken()])
    out = capsys.readouterr().out
    assert out.count("metrics.jsonl cannot be written, training continues: run_dir: got") == 1
    lines = [json.loads(line)["global_step"] for line in theirs.read_text().splitlines()]
    assert lines == [3, 4, 5, 6, 7, 8]


def test_a_run_without_a_directory_locks_nothing(tmp_path: Path) -> None:
    lock = RunLock(None)
    with lock.held(print), RunLock(None).held(print):
        lock.renew(make=True)
    assert list(tmp_path.iterdir()) == []
