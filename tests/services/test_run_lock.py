"""One run trains in a run directory at a time, whoever tries; its death frees the directory."""

import errno
import fcntl
import json
import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.disks import tree
from support.messages import expect_error
from support.references import References
from support.runs import TOWER, command, digests, inspected, run, started, wait_for
from support.small import DATA, trainer

import quorate
from quorate.errors import SettingError

NAME = "run.lock"
# The number of pairs of runs started in one directory.
PAIRS = int(os.environ.get("QUORATE_TEST_PAIRS", "2"))


def lasting(run_dir: Path, *arguments: str, options: tuple[str, ...] = TOWER) -> list[str]:
    return command("lasting.py", *arguments, options=(*options, "--run-dir", str(run_dir)))


@contextmanager
def held(run_dir: Path) -> Iterator[quorate.Trainer]:
    """Make an update by a trainer of this process, which trains on within the block."""
    made = trainer(run_dir, 1, summary_every_s=None)
    updates = made.updates(DATA, steps=9)
    next(updates)
    try:
        yield made
    finally:
        updates.close()


def require_refused(run_dir: Path) -> None:
    with pytest.raises(SettingError, match="another Trainer of this process"):
        trainer(run_dir, 1, summary_every_s=None).fit(DATA, steps=1)


# --- two runs -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_of_two_runs_at_random_distances_exactly_one_trains(
    tmp_path: Path, references: References
) -> None:
    chance = random.Random(0)
    steps = 25
    expected = references.on_a_tower("lasting.py", f"updates={steps}").digests
    for number in range(PAIRS):
        run_dir, begun = tmp_path / f"{number}", tmp_path / f"{number}-begun"
        begun.mkdir()
        words = lasting(run_dir, f"updates={steps}", "pause=0.01", f"begun={begun}")
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(run, words)
            time.sleep(chance.uniform(0.0, 0.3))
            both = [run(words), first.result()]
        assert sorted(one.code for one in both) == [0, 2], both
        [loser] = [one for one in both if one.code == 2]
        [pid] = [entry.name for entry in begun.iterdir()]  # one run has made updates
        assert f"process {pid} on " in loser.err
        assert loser.err.count("\n") == 1
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        assert [line["global_step"] for line in lines] == list(range(1, steps + 1))
        assert digests(run_dir) == expected


@pytest.mark.slow
def test_beside_a_running_run_others_are_refused_and_inspect_works(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    options = ("--engine", "processes", "--workers", "1", "--save-every-steps", "5")
    words = lasting(run_dir, "pause=0.01", options=options)
    with started(tmp_path, words) as (process, _):
        wait_for(process, "step 8/")
        for more in ((), ("--fresh",)):
            refused = run(lasting(run_dir, "pause=0.01", options=(*options, *more)))
            assert refused.code == 2
            assert f"process {process.pid} on " in refused.err
            assert refused.err.count("\n") == 1
        assert "aside-1" not in tree(run_dir)
        assert inspected(run_dir)["global_step"] >= 5
        # The run's death frees the directory at once, whatever is left of the run.
        process.kill()
        process.wait()
        again = run(lasting(run_dir, "updates=1"))
        assert again.code == 0, again.err
        assert "nothing to do" in again.out


def test_two_trainers_of_one_process_are_two_runs(tmp_path: Path) -> None:
    first, second = trainer(tmp_path), trainer(tmp_path, fresh=True)
    updates = first.updates(DATA, steps=4)
    next(updates)
    first.save()  # the directory is ours already
    before = tree(tmp_path)
    with expect_error(SettingError, name="run_dir"):
        second.fit(DATA, steps=2)
    assert tree(tmp_path) == before
    assert [report.global_step for report in updates] == [2, 3, 4]
    second.fit(DATA, steps=2)
    assert (tmp_path / "aside-1" / "checkpoints").is_dir()
    second.fit(DATA, steps=4)  # again, by the same trainer
    with held(tmp_path) as third:
        assert third.global_step == 5
        # Neither a loop nor a save outside of a loop.
        for refused in (lambda: second.fit(DATA, steps=5), second.save):
            with pytest.raises(SettingError, match="another Trainer of this process"):
                refused()
    assert second.save().is_dir()
    second.fit(DATA, steps=5)


# --- forks ----------------------------------------------------------------------------------------


def test_a_fork_does_not_release_the_lock_of_the_run(tmp_path: Path) -> None:
    with held(tmp_path):
        if (pid := os.fork()) == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        require_refused(tmp_path)


def test_who_may_not_write_to_a_directory_cannot_lock_it(tmp_path: Path) -> None:
    for folder, file in ((0o755, 0o600), (0o775, 0o660), (0o777, 0o666)):
        (tmp_path / NAME).touch()
        (tmp_path / NAME).chmod(0o644)  # of an earlier version
        tmp_path.chmod(folder)
        with held(tmp_path):
            assert (tmp_path / NAME).stat().st_mode & 0o777 == file


# --- directories without locks --------------------------------------------------------------------


def test_something_else_in_its_place_is_refused_at_once(tmp_path: Path) -> None:
    for put in (os.mkfifo, lambda path: path.symlink_to(path.with_name("other"))):
        put(tmp_path / NAME)
        with expect_error(SettingError, name="run_dir"):
            trainer(tmp_path).fit(DATA, steps=1)
        (tmp_path / NAME).unlink()
    assert not (tmp_path / "other").exists()


def test_a_file_system_without_locks_is_said_and_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    made = trainer(tmp_path)
    made.fit(DATA, steps=2)
    assert made.global_step == 2
    out = capsys.readouterr().out
    assert out.count(f"{tmp_path} cannot be locked (No locks available)") == 1


def test_nfs_wants_a_file_that_is_open_for_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Imitate the answer of Linux's client; the lock itself is real."""
    real = fcntl.flock

    def as_on_nfs(descriptor: int, how: int) -> None:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")
        real(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", as_on_nfs)
    with held(tmp_path):
        require_refused(tmp_path)
    with held(tmp_path):
        pass
