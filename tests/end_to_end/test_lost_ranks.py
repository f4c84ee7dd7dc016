"""Ranks that come to grief in each phase: all end soon, it is said why, and nothing is left."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
import torch.distributed
from support.memory_group import inside, memory_group
from support.references import References
from support.runs import SCRIPTS, command, inspected, processes_of, started, wait_for

from quorate.transports.collective.judge import LOST_S

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed"),
    pytest.mark.skipif(not Path("/proc/self").exists(), reason="ranks are forked"),
]

SCRIPT = str(SCRIPTS / "lost_ranks.py")
KILLS = int(os.environ.get("QUORATE_TEST_KILLS", "2"))
RANKS = 3
LIMIT_S = 150.0
SLOW_S = 60.0  # beyond what is promised: these machines are busy


class Lost(NamedTuple):
    """A run that is over."""

    code: int
    said: str
    after_s: float  # from what happened to the end of all processes
    step: int | None  # of the newest checkpoint


def of_quorate(*words: str, options: tuple[str, ...] = ()) -> list[str]:
    ranks = ("--engine", "collective", "--workers", str(RANKS))
    return command(SCRIPT, *words, options=(*ranks, *options))


def of_torchrun(*words: str, restarts: int = 0) -> list[str]:
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
    start += ["--max-restarts", str(restarts), "--monitor-interval", "0.1"]
    # Its rendezvous is on a port that is free: two tests may run side by side.
    return [*start, "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", SCRIPT, *words]


def lost(folder: Path, words: list[str]) -> Lost:
    """Run to the end of all processes; nothing may be left of them."""
    run_dir, pids = folder / "run", folder / "pids"
    pids.mkdir()
    before = shared_memory()
    with started(folder, [*words, str(run_dir), str(pids)]) as (process, mark):
        try:
            said, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            said, _ = process.communicate()
            pytest.fail(f"it went on for {LIMIT_S:g} s: {said}")
        until = time.monotonic() + SLOW_S
        while (left := processes_of(mark)) and time.monotonic() < until:
            time.sleep(0.05)
        ended_at = time.time()
        assert not left, said
        files = {p.name for p in (folder / "temporary").iterdir() if p.name.startswith("quorate")}
        # What had no end of its own has left the folder where ranks meet, and nothing in it.
        assert process.returncode < 0 or not files, files
    assert shared_memory() <= before
    happened = pids / "happened"
    after_s = ended_at - float(happened.read_text()) if happened.exists() else 0.0
    step = inspected(run_dir)["global_step"] if (run_dir / "checkpoints").exists() else None
    return Lost(process.returncode, said, after_s, step)


def shared_memory() -> set[str]:
    folder = Path("/dev/shm")
    names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    return {name for name in names if name.startswith(("quorate", "torch_"))}  # others have theirs


# What happens where, what is said of it, and how long it may take until all have ended.
SOON_S = 2.0
GRIEF = {
    "hang forward 1": ("rank 1 on {host} hangs: it is at forward of step 3, shard 1", 6.0),
    "hang backward 0": ("rank 0 on {host} hangs: it is at backward of step 3, shard 0", 6.0),
    "raise forward 1": ("ValueError: mine", SOON_S),
    "memory forward 1": ("MemoryError: no room for a tensor", SOON_S),
    "exit fetching 1": ("sys.exit(0) was called by the code that computes a shard", SOON_S),
    "STOP forward 1": ("rank 1 on {host} was not heard of for 10 s", LOST_S + SOON_S),
    "STOP exchange 2": ("rank 2 on {host} was not heard of for 10 s", LOST_S + SOON_S),
    "STOP evaluation 1": ("rank 1 on {host} was not heard of for 10 s", LOST_S + SOON_S),
    "KILL update 2": ("rank 2 {killed}", SOON_S),
    "KILL evaluation 1": ("rank 1 {killed}", SOON_S),
}
# It may take more time, or hangs for a moment, where it is measured by seconds.
SHORT = ("--worker-timeout-s", "3")


@pytest.mark.parametrize("grief", GRIEF)
def test_under_an_own_start_all_end_and_say_why(grief: str, tmp_path: Path) -> None:
    says, within_s = GRIEF[grief]
    options = SHORT if grief.startswith("hang") else ()
    ended = lost(tmp_path, of_quorate(*grief.split(), "3", options=options))
    assert ended.code == 1, ended.said
    expected = says.format(host=os.uname().nodename, killed="was killed by signal 9 (SIGKILL)")
    assert expected in ended.said, ended.said
    assert re.search(rf"\b(rank|worker) {grief[-1]}\b", ended.said), ended.said
    assert ended.after_s < within_s + SLOW_S, ended.said
    assert ended.step in (2, 3, 4, 5, 6), ended.said


@pytest.mark.parametrize("grief", ["STOP forward 0", "KILL evaluation 2"])
def test_under_torchrun_too(grief: str, tmp_path: Path) -> None:
    _, within_s = GRIEF.get(grief, ("", LOST_S + SOON_S))
    ended = lost(tmp_path, of_torchrun(*grief.split(), "3"))
    assert ended.code == 1, ended.said
    assert f"quorate: rank {grief[-1]} on {os.uname().nodename} " in ended.said
    assert ended.after_s < within_s + SLOW_S, ended.said


def test_rank_0_is_killed_and_the_others_end(tmp_path: Path) -> None:
    ended = lost(tmp_path, of_quorate("KILL", "forward", "0", "3"))
    assert ended.code == -signal.SIGKILL
    assert ended.after_s < SOON_S + SLOW_S


def test_a_rank_0_that_a_person_stops_may_go_on(tmp_path: Path, references: References) -> None:
    """By Ctrl-Z, which reaches it alone: the ranks that it has started wait for it."""
    pids = tmp_path / "pids"
    pids.mkdir()
    words = of_quorate("STOP", "forward", "0", "3", str(tmp_path / "run"), str(pids))
    with started(tmp_path, words) as (process, _):
        until = time.monotonic() + LIMIT_S
        while not (pids / "happened").exists() and time.monotonic() < until:
            time.sleep(0.1)
        time.sleep(LOST_S + 3)
        os.kill(int((pids / "0").read_text()), signal.SIGCONT)
        said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, said
    assert undisturbed(references) in said


def test_memory_of_a_container_that_runs_out_is_named(tmp_path: Path) -> None:
    with memory_group(3 << 30) as group:
        ended = lost(tmp_path, inside(group, of_quorate("hungry", "forward", "1", "3")))
    assert ended.code == 1, ended.said
    assert re.search(r"quorate: rank 1 .*memory ran out", ended.said), ended.said


def test_all_ranks_are_shown_and_a_slow_one_is_named(tmp_path: Path) -> None:
    with patched({"STEPS": "80", "PAUSE_S": "0.05"}):
        ended = lost(tmp_path, of_quorate("slow", "x", "1", "0"))
    assert ended.code == 0, ended.said
    (line,) = [line for line in ended.said.splitlines() if "slow" in line]
    assert line.startswith("slow workers: worker 1 (cpu) needed up to "), ended.said
    assert "mostly in forward" in line
    assert not re.search(r"worker [02]\b", line), ended.said
    log = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    (noted,) = [entry["slow"] for entry in map(json.loads, log) if "slow" in entry]
    assert noted == inspected(tmp_path / "run")["slow"]
    assert noted[0].startswith("worker 1 (cpu) is slow: ")
    shown = re.findall(r"^status (\d) (\d+) \w+ \d+ (\d+)$", ended.said, re.MULTILINE)
    pids = [(tmp_path / "pids" / number).read_text() for number, _, _ in shown]
    assert [(number, pid) for number, pid, _ in shown] == [*zip("012", pids, strict=True)]
    for number, _, shards in shown:  # others are as of their last beat
        assert int(shards) > 40 * (2 if number == "2" else 1)


PHASES = ("start", "meeting", "first", "forward", "backward", "exchange", "update")


@pytest.mark.parametrize("target", ["0", "1"])
@pytest.mark.parametrize("phase", [*PHASES, "evaluation", "saving"])
def test_sigterm_in_each_phase_saves_and_ends_all(phase: str, target: str, tmp_path: Path) -> None:
    where = ("exchange", target, "0") if phase == "first" else (phase, target, "3")
    if phase in ("start", "meeting"):
        where = (phase, target, "0")
    elif phase == "saving":
        where = (phase, target, "2")
    ended = lost(tmp_path, of_quorate("TERM", *where))
    assert ended.after_s < 5 + SLOW_S, ended.said
    if phase in ("start", "meeting"):  # nothing was trained
        # A script that has not come to fit yet dies by the signal.
        codes = (-signal.SIGTERM, 128 + signal.SIGTERM) if target == "0" else (1,)
        assert ended.code in codes, ended.said
        assert target == "0" or "rank 1 was killed by signal 15 (SIGTERM)" in ended.said
        return
    assert ended.code == 128 + signal.SIGTERM, ended.said
    if phase == "first":  # ranks compare what they are: there is no step to end
        return
    who = "SIGTERM" if target == "0" else "rank 1: SIGTERM"
    assert f": {who}\n" in ended.said
    assert "saved step" in ended.said
    assert ended.step is not None


def test_sigterm_under_torchrun_saves_and_it_may_start_them_anew(
    tmp_path: Path, references: References
) -> None:
    ended = lost(tmp_path, of_torchrun("TERM", "evaluation", "1", "3"))
    assert ended.code != 0, ended.said  # or torchrun would take the run for done
    assert ": rank 1: SIGTERM\n" in ended.said
    assert "exitcode  : 143" in ended.said
    assert ended.after_s < 5 + SLOW_S, ended.said
    (tmp_path / "anew").mkdir()
    anew = lost(tmp_path / "anew", of_torchrun("TERM", "forward", "1", "3", restarts=1))
    assert anew.code == 0, anew.said
    assert undisturbed(references) in anew.said


def test_sigterm_to_torchrun_itself_saves_and_ends_all(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    pids.mkdir()
    words = of_torchrun("nothing", "x", "0", "0", str(tmp_path / "run"), str(pids))
    env_steps = {"STEPS": "4000", "PAUSE_S": "0.02"}
    with patched(env_steps), started(tmp_path, words) as (process, mark):
        wait_for(process, "step 1/")
        begun = time.monotonic()
        process.terminate()
        said, _ = process.communicate(timeout=LIMIT_S)
        assert time.monotonic() - begun < 5 + SLOW_S, said
        assert not processes_of(mark)
    assert "saved step" in said
    assert inspected(tmp_path / "run")["global_step"] > 0


class patched:  # noqa: N801  as a function
    """Variables of the environment, for a while."""

    def __init__(self, values: dict[str, str]) -> None:
        self._values = values

    def __enter__(self) -> None:
        os.environ.update(self._values)

    def __exit__(self, *_: object) -> None:
        for name in self._values:
            del os.environ[name]


def undisturbed(references: References, steps: int = 8) -> str:
    with patched({"STEPS": str(steps)}):
        # Who is asked once more has it, if the words are the same.
        words = ("nothing", f"in {steps} steps", "0", "0")
        reference = references.on_a_tower("lost_ranks.py", *words)
    (line,) = [line for line in reference.out.splitlines() if line.startswith("digest ")]
    return str(line)


def test_random_ranks_are_killed_at_random_moments(tmp_path: Path, references: References) -> None:
    """A rank is killed again and again, wherever it is: the bits of a run that nobody disturbed."""
    chance = random.Random(16)
    pids = tmp_path / "pids"
    pids.mkdir()
    steps = 40 * KILLS
    expected = undisturbed(references, steps)
    words = of_torchrun("nothing", "x", "0", "0", str(tmp_path / "run"), str(pids), restarts=60)
    before = shared_memory()
    killed: list[tuple[int, str]] = []
    slowly = {"STEPS": str(steps), "PAUSE_S": "0.02"}
    with patched(slowly), started(tmp_path, words) as (process, mark):
        heard = threading.Event()
        said: list[str] = []

        def listen() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                said.append(line)
                if "step" in line:
                    heard.set()

        listener = threading.Thread(target=listen)
        listener.start()
        until = time.monotonic() + 60 + 40 * KILLS
        while len(killed) < KILLS and process.poll() is None and time.monotonic() < until:
            # Mostly while they train, now and then while they start.
            if chance.random() < 0.8:
                heard.clear()
                heard.wait(60)
            time.sleep(chance.uniform(0.0, 2.0))
            rank = chance.randrange(RANKS)
            with suppress(OSError, ValueError):
                pid = int((pids / str(rank)).read_text())
                if SCRIPT in processes_of(mark).get(pid, ""):
                    os.kill(pid, signal.SIGKILL)
                    killed.append((rank, said[-1] if said else ""))
                    (pids / str(rank)).unlink()
        process.wait(60 + 40 * KILLS)
        listener.join()
        everything = "".join(said)
        assert process.returncode == 0, everything[-5000:]
        assert not processes_of(mark)
        left = {p.name for p in (tmp_path / "temporary").iterdir() if p.name.startswith("quorate")}
        assert not left
    assert shared_memory() <= before
    assert len(killed) == KILLS, everything[-5000:]
    assert expected in everything
