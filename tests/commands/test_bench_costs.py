"""``quorate bench --costs``: what a plan has to know beside speeds, measured for real."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.small import DATA, trainer

from quorate.commands.bench import costs as measuring
from quorate.commands.bench.contenders import Contender
from quorate.commands.bench.costs import costs, saves_in
from quorate.commands.bench.lost_worker import LostWorker
from quorate.commands.bench.runs import Program, run
from quorate.coordination.protocol import Done, Joined, Left, Replace
from quorate.transports.worker_status import PHASES, WorkerStatus

SCRIPT = Path(__file__).parents[1] / "scripts" / "measured.py"


def status(number: int, pid: int | None, thread: int | None = None) -> WorkerStatus:
    spent = dict.fromkeys(PHASES, 0.0)
    return WorkerStatus(number, "cpu", pid, thread, "forward", 0, 0, 0.0, spent, 0)


def test_the_worker_that_is_killed_is_the_one_that_is_waited_for() -> None:
    """By its transport: a process that has the number of a worker may be a stranger's."""
    sent: list[Replace] = []
    stranger = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with stranger:
        workers = [status(0, os.getpid()), status(1, stranger.pid), status(2, None)]
        lost = LostWorker(workers, sent.append)
        assert [effect.worker for effect in sent] == [1]
        time.sleep(0.1)
        assert stranger.poll() is None
    assert not lost.is_over
    lost.heard(Done(1, 0, 0), 0.0)  # it was on its way already
    lost.heard(Left(0, "killed"), 0.0)
    assert lost.detection_s is None
    lost.heard(Left(1, "killed"), 0.0)
    assert lost.detection_s is not None
    lost.heard(Done(1, 0, 0), 0.0)
    lost.heard(Joined(1), 0.0)
    assert not lost.is_over
    time.sleep(0.02)
    lost.heard(None, 0.0)
    lost.heard(Done(0, 0, 1), 0.0)
    assert lost.restart_s is None
    lost.heard(Done(1, 0, 1), 0.0)
    assert lost.is_over
    assert lost.restart_s is not None
    assert lost.restart_s >= 0.02


def test_towers_are_not_killed() -> None:
    sent: list[Replace] = []
    assert LostWorker([status(0, os.getpid(), thread=7)], sent.append).is_over
    assert sent == []


def test_saves_are_seen_in_what_a_run_kept(tmp_path: Path) -> None:
    trainer(tmp_path, save_every_steps=1, keep=4).fit(DATA, steps=6)
    (saves,) = saves_in(tmp_path)
    assert saves.every_s > 0
    assert saves.took_s >= 0
    assert saves_in(tmp_path / "nothing") == []


@pytest.mark.slow
def test_costs_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "SAVE_EVERY_S", 0.1)
    options = {"engine": "processes"}
    program = Program(str(SCRIPT), None, ("even",), options, 1.0)
    contender, log, said = Contender("cpu", 1), tmp_path / "log", []
    base = [run(program, contender, 4, log)]
    found = costs(program, contender, 4, base, log, said.append)
    copies = min(base[0].cores, measuring.MOST_COPIES)
    assert ("crowding" in found) == (copies > 1)
    if copies > 1:
        assert found["crowding"]["times"] >= 1.0
        assert len(found["copies"]) == copies
        assert said[0] == f"costs: {copies} copies at once"
    assert found["by_shard"]["runs"][0]["update"] == "async"
    # How many saves there were in that time is the machine's affair.
    assert found.get("saving", {"stall_s": 0.0})["stall_s"] >= 0
    assert found["failing"]["restart_s"] > 0
    assert found["failing"]["detection_s"] > 0
