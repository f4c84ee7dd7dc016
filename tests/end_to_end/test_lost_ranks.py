"""Ranks fail in each phase: all end soon, with the reason, and nothing is left."""

import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytest
import torch.distributed
from support.heard import Heard
from support.memory_group import inside, memory_group
from support.references import References
from support.runs import TOWER, command, inspected, processes_of, run, soon, started, torchrun

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed"),
    pytest.mark.skipif(not Path("/proc/self").exists(), reason="ranks are forked"),
]

KILLS = int(os.environ.get("QUORATE_TEST_KILLS", "1"))
RANKS = 3
LIMIT_S = 150.0
SOON_S = 2.0
LOST_S = 10.0  # a rank silent for as long is lost
SLOW_S = 60.0  # beyond the promise: these machines are busy
HOST = os.uname().nodename


class Lost(NamedTuple):
    """A finished run."""

    code: int
    said: str
    after_s: float  # from the event to the end of all processes
    step: int | None  # of the newest checkpoint


def of_ranks(folder: Path, *words: str, options: tuple[str, ...] = ()) -> list[str]:
    """Return a command line of ranks with a folder for notes, and a save every second step."""
    (folder / "notes").mkdir(exist_ok=True)
    saves = ("--run-dir", str(folder / "run"), "--save-every-steps", "2")
    own = ("--engine", "collective", "--workers", str(RANKS))
    words = (*words, f"folder={folder / 'notes'}")
    return command("ranks.py", *words, options=(*own, *saves, *options))


def of_torchrun(folder: Path, *words: str, restarts: int = 0) -> list[str]:
    return torchrun(RANKS, *of_ranks(folder, *words)[1:], restarts=restarts)


@contextmanager
def nothing_is_left(folder: Path, words: list[str]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a run; soon after its end no process, file or memory of the run is left.

    Yields the values of ``started``.
    """
    before = shared_memory()
    with started(folder, words) as (process, mark):
        yield process, mark
        assert process.returncode is not None
        soon(lambda: not processes_of(mark), lambda: processes_of(mark))
        files = {p.name for p in (folder / "temporary").iterdir() if p.name.startswith("quorate")}
        # A killed run leaves the folder where ranks meet; a run with an end of its own nothing.
        assert process.returncode < 0 or not files, files
    assert shared_memory() <= before


def shared_memory() -> set[str]:
    folder = Path("/dev/shm")
    names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    return {name for name in names if name.startswith(("quorate", "torch_"))}  # others have theirs


def lost(folder: Path, words: list[str]) -> Lost:
    """Run to the end of all processes."""
    with nothing_is_left(folder, words) as (process, _):
        try:
            said, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            said, _ = process.communicate()
            pytest.fail(f"it went on for {LIMIT_S:g} s: {said}")
        ended_at = time.time()
    happened = folder / "notes" / "happened"
    after_s = ended_at - float(happened.read_text()) if happened.exists() else 0.0
    has_saved = any((folder / "run").glob("checkpoints/step-*"))
    step = inspected(folder / "run")["global_step"] if has_saved else None
    return Lost(process.returncode, said, after_s, step)


def wait_for(path: Path) -> str:
    soon(lambda: path.exists() and path.read_text(), limit_s=LIMIT_S)
    return path.read_text()


# The event and its place, the message, and the time limit for the end of all ranks.
GRIEF = {
    # Where seconds decide, a rank may need more time, or may hang only for a moment.
    "hang backward,0": ("rank 0 on {host} hangs: it is at backward of step 3, shard 0", 6.0),
    "exit fetching,1": (r"sys.exit\(0\) was called by the code that computes a shard", SOON_S),
    "STOP exchange,2": ("rank 2 on {host} was not heard of for 10 s", LOST_S + SOON_S),
    # Reported by the parent, or by the pipes of other ranks: by the first to hear.
    **{
        f"KILL {at}": (r"rank \d (was killed by signal 9 \(SIGKILL\)|on {host} has ended)", SOON_S)
        for at in ("exchange,1", "saving,2")
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("grief", GRIEF)
def test_under_an_own_start_all_end_and_say_why(grief: str, tmp_path: Path) -> None:
    (says, within_s), (what, at) = GRIEF[grief], grief.split()
    options = ("--worker-timeout-s", "5", "--workers", "2") if what == "hang" else ()
    then = ("then=tells",) if "saving" in at else ("size=2",) * (what == "hang")
    words = of_ranks(tmp_path, f"what={what}", f"at={at},3", *then, options=options)
    ended = lost(tmp_path, words)
    assert ended.code == 1, ended.said
    assert len(re.findall(says.format(host=HOST), ended.said)) == 1, ended.said
    assert re.search(rf"\b(rank|worker) {grief[-1]}\b", ended.said), ended.said
    assert ended.after_s < within_s + SLOW_S, ended.said
    assert ended.step in (2, 3, 4, 5, 6), ended.said


def test_rank_0_is_killed_and_the_others_end(tmp_path: Path) -> None:
    ended = lost(tmp_path, of_ranks(tmp_path, "what=KILL", "at=forward,0,3"))
    assert ended.code == -signal.SIGKILL
    assert ended.after_s < SOON_S + SLOW_S


@pytest.mark.slow
def test_rank_0_is_stopped_and_may_go_on(tmp_path: Path, references: References) -> None:
    """Stop by Ctrl-Z, for rank 0 alone: the other ranks wait for rank 0."""
    words = of_ranks(tmp_path, "what=STOP", "at=forward,0,3")
    with nothing_is_left(tmp_path, words) as (process, _):
        wait_for(tmp_path / "notes" / "happened")
        time.sleep(LOST_S + 2)
        os.kill(int((tmp_path / "notes" / "0").read_text()), signal.SIGCONT)
        said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, said
    expected = references.on_a_tower("ranks.py").digests
    assert inspected(tmp_path / "run")["digest"] == expected[0]


@pytest.mark.slow
def test_memory_of_a_container_that_runs_out_is_named(tmp_path: Path) -> None:
    with memory_group(2 << 30) as group:  # full within the timeout
        words = of_ranks(tmp_path, "what=hungry", "at=forward,1,3")
        ended = lost(tmp_path, inside(group, words))
    assert ended.code == 1, ended.said
    assert re.search(r"quorate: rank 1 .*memory ran out", ended.said), ended.said


@pytest.mark.parametrize("at", ["start,1,0", "exchange,1,3", "saving,0,3"])
def test_sigterm_in_each_phase_saves_and_ends_all(at: str, tmp_path: Path) -> None:
    phase, target, _ = at.split(",")
    then = ("then=tells",) if phase == "saving" else ()
    ended = lost(tmp_path, of_ranks(tmp_path, "what=TERM", f"at={at}", *then))
    assert ended.after_s < 5 + SLOW_S, ended.said
    if phase == "start":  # before fit, a script dies by the signal
        assert ended.code == 1, ended.said
        assert "rank 1 was killed by signal 15 (SIGTERM)" in ended.said
        return
    assert ended.code == 128 + signal.SIGTERM, ended.said
    assert (": SIGTERM\n" if target == "0" else ": rank 1: SIGTERM\n") in ended.said
    assert "saved step" in ended.said
    assert ended.step is not None


@pytest.mark.slow
def test_random_ranks_are_killed_at_random_moments_and_torchrun_is_told_to_end(
    tmp_path: Path, references: References
) -> None:
    """A rank is killed again and again, in any place; at last torchrun gets SIGTERM.

    The state saved at SIGTERM, trained to the end on a tower, has the bits of an undisturbed run.
    """
    chance = random.Random(16)
    steps = f"steps={40 + 20 * KILLS}"
    words = of_torchrun(tmp_path, steps, "pause=0.04", "then=tells", restarts=60)
    notes, killed = tmp_path / "notes", 0
    with nothing_is_left(tmp_path, words) as (process, mark):
        said = Heard(process)
        at = 0
        until = time.monotonic() + LIMIT_S + 40 * KILLS
        while killed < KILLS and time.monotonic() < until:
            # Mostly while they train, now and then while they start.
            if chance.random() < 0.8:
                at = said.wait_for("made step", at)
            time.sleep(chance.uniform(0.0, 2.0))
            with suppress(OSError, ValueError):
                pid = int((path := notes / str(chance.randrange(RANKS))).read_text())
                if pid in processes_of(mark):
                    os.kill(pid, signal.SIGKILL)
                    path.unlink()
                    killed += 1
                    at = len(said.lines)
        # Ranks may print a made step after the loss of a rank; a new start prints their meeting.
        said.wait_for("made step", said.wait_for("ranks met at", at))
        told_at = time.monotonic()
        process.terminate()
        code = said.ended(LIMIT_S)
        assert time.monotonic() - told_at < 5 + SLOW_S, said.all
    assert killed == KILLS, said.all[-5000:]
    assert code != 0
    assert "saved step" in said.all
    assert 0 < inspected(tmp_path / "run")["global_step"] < 40 + 20 * KILLS
    rest = ("ranks.py", steps)
    ended = run(command(*rest, options=(*TOWER, "--run-dir", str(tmp_path / "run"))))
    assert ended.code == 0, ended.said
    assert inspected(tmp_path / "run")["digest"] == references.on_a_tower(*rest).digests[0]
