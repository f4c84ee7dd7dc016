"""What workers are at: timesheets, and statuses of real runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import quorate
from quorate.machine.shared_memory import Segment
from quorate.replica.loss import Loss
from quorate.services.display.straggler import SlowWorkers
from quorate.transports import worker_status
from quorate.transports.worker_status import PHASES, Timesheet

SCRIPT = Path(__file__).parents[1] / "scripts" / "statuses.py"


# --- timesheets -----------------------------------------------------------------------------------


def test_a_timesheet_adds_up_what_ends() -> None:
    sheet = Timesheet(bytearray(Timesheet.SIZE))
    began = time.monotonic()
    for phase in ("starting", "waiting"):
        sheet.tell(phase)
    for shard in range(3):
        for phase, seconds in (("fetching", 0.0), ("forward", 0.02), ("backward", 0.01)):
            sheet.tell(phase, 7, shard)
            time.sleep(seconds)
        sheet.tell("waiting")
    time.sleep(0.05)
    earlier = time.monotonic()
    found = sheet.read()
    later = time.monotonic()
    assert found[:3] == ("waiting", 7, 2)  # the shard it was at last
    assert found.shards == 3
    assert tuple(found.seconds) == PHASES
    assert found.seconds["forward"] >= 0.06
    assert found.seconds["backward"] >= 0.03
    assert 0.05 <= found.seconds["waiting"] < 1  # the present phase too
    assert earlier - began - 1e-3 <= sum(found.seconds.values()) <= later - began
    assert began + 0.09 <= found.since <= earlier - 0.05


def test_what_goes_on_is_no_new_phase() -> None:
    sheet = Timesheet(bytearray(Timesheet.SIZE))
    sheet.tell("waiting")
    sheet.tell("fetching", 0, 1)
    since = sheet.read().since
    sheet.tell("fetching", 0, 1)
    assert (sheet.read().since, sheet.read().shards) == (since, 1)
    sheet.tell("fetching", 0, 2)  # another shard
    assert sheet.read().since > since
    assert sheet.read().shards == 2


def test_the_stage_that_is_waited_for_belongs_to_a_phase() -> None:
    sheet = Timesheet(bytearray(Timesheet.SIZE))
    sheet.tell("forward", 0, 1)
    since = sheet.read().since
    assert sheet.read().stage == -1
    sheet.waits_for(2)
    sheet.waits_for(1)
    sheet.tell("forward", 0, 1)  # goes on
    assert (sheet.read().stage, sheet.read().since) == (1, since)
    sheet.tell("backward")
    assert sheet.read().stage == -1


def test_another_life_goes_on_with_the_same_sheet() -> None:
    memory = Segment(3 * Timesheet.SIZE)
    first, other = (Timesheet(memory.map, n * Timesheet.SIZE) for n in (1, 2))
    first.tell("starting")
    first.tell("fetching", 4, 1)
    again = Timesheet(Segment(memory.nbytes, os.dup(memory.fd)).map, Timesheet.SIZE)
    again.tell("starting")
    again.tell("fetching", 5, 0)
    assert first.read()[:3] == ("fetching", 5, 0)
    assert first.read().shards == 2
    assert other.read().shards == 0


WRITER = """
import runpy, sys
from mmap import mmap

module = runpy.run_path(sys.argv[1])  # without the package, which takes long to import
sheet, step = module["Timesheet"](mmap(int(sys.argv[2]), module["Timesheet"].SIZE)), 0
while True:
    for phase in module["PHASES"][1:]:
        sheet.tell(phase, step, step % 5)
    step += 1
"""


def test_what_is_read_while_another_process_writes_it_is_whole() -> None:
    memory = Segment(Timesheet.SIZE)
    sheet = Timesheet(memory.map)
    began = time.monotonic()
    sheet.tell("starting")
    words = [sys.executable, "-c", WRITER, str(worker_status.__file__), str(memory.fd)]
    with subprocess.Popen(words, pass_fds=[memory.fd]) as writer:
        try:
            while sheet.read().shards == 0:
                assert time.monotonic() < began + 60
            shards = 0
            for _ in range(20_000):
                earlier = time.monotonic()
                found = sheet.read()
                later = time.monotonic()
                assert found.shard == found.step % 5
                assert found.shards == found.step + (found.phase != "waiting")
                assert found.shards >= shards
                shards = found.shards
                # All time since the beginning is in some phase.
                assert earlier - began - 1e-3 <= sum(found.seconds.values()) <= later - began + 1e-3
        finally:
            writer.kill()


# --- towers ---------------------------------------------------------------------------------------


DATA = TensorDataset(torch.ones(24, 3))


def on_towers(loss: Loss, *, workers: int, shards: int) -> quorate.Trainer:
    return quorate.Trainer(
        lambda: nn.Linear(3, 1),
        loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=1e-3),
        batch_size=12,
        shards=shards,
        devices="cpu",
        workers=quorate.Workers(workers, engine="towers"),
    )


def test_towers_say_what_they_are_at() -> None:
    sleep_s, steps, shards = 0.02, 5, 4

    def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        time.sleep(sleep_s)
        return model(batch[0]).square().mean()

    trainer = on_towers(loss, workers=2, shards=shards)
    began = time.monotonic()
    taken = []
    for _ in trainer.updates(DATA, steps=steps):
        taken.append((time.monotonic(), trainer.workers))
        threads = {thread.native_id for thread in threading.enumerate()}
        assert {each.thread for each in taken[-1][1]} <= threads - {threading.get_native_id()}
    for number in (0, 1):
        own = [(at, statuses[number]) for at, statuses in taken]
        (first_at, first), (last_at, last) = own[0], own[-1]
        assert [s.number for _, s in own] == [number] * steps
        assert (last.device, last.pid, last.is_gone) == ("cpu", None, False)
        assert last.phase in ("waiting", "pushing")  # the caller has the report
        assert last.step == steps - 1
        assert last.seconds["forward"] >= sleep_s * last.shards
        assert last.seconds["forward"] < last_at - began
        # All of its time is somewhere.
        spent_s = sum(last.seconds.values()) - sum(first.seconds.values())
        assert spent_s == pytest.approx(last_at - first_at, abs=0.1)
        assert all(a.shards <= b.shards for (_, a), (_, b) in pairwise(own))
    for step, (_, statuses) in enumerate(taken, start=1):
        begun = sum(status.shards for status in statuses)
        assert step * shards <= begun <= 2 * step * shards  # a late one may be begun twice


def test_a_slow_tower_is_named() -> None:
    def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        time.sleep(0.15 if threading.current_thread().name.endswith("-2") else 0.03)
        return model(batch[0]).square().mean()

    trainer = on_towers(loss, workers=3, shards=6)
    slow_workers, lines = SlowWorkers(), list[str]()
    for _ in trainer.updates(DATA, steps=400):
        lines += slow_workers.named(trainer.workers, time.monotonic())
        if any("worker 2" in line for line in lines):
            break
    # On a busy machine another one may be slow for a while too.
    assert re.search(
        r"^worker 2 \(cpu\) is slow: 0\.\d\d s a shard, \d+\.\d times the median of .* m?s; "
        r"in forward: 0\.\d\d s against .* m?s$",
        "\n".join(lines),
        re.MULTILINE,
    )


# --- processes ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_processes_say_what_they_are_at_through_all_their_lives() -> None:
    command = [sys.executable, "-m", "quorate", "run", "--devices", "cpu", "--workers", "2"]
    ended = subprocess.run([*command, str(SCRIPT)], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    taken: list[tuple[float, dict[str, Any], dict[str, Any]]] = found["taken"]
    sleeps_s = {"forward": 0.02, "backward": 0.01}
    for number in (0, 1):
        own = [(at, statuses[number]) for at, *statuses in taken]
        (first_at, first), (last_at, last) = own[0], own[-1]
        assert {(s["number"], s["device"], s["thread"]) for _, s in own} == {(number, "cpu", None)}
        spent_s = sum(last["seconds"].values()) - sum(first["seconds"].values())
        assert spent_s == pytest.approx(last_at - first_at, abs=0.1)
        for (_, a), (_, b) in pairwise(own):
            assert a["shards"] <= b["shards"]
            assert all(a["seconds"][phase] <= b["seconds"][phase] for phase in PHASES)
        for phase, sleep_s in sleeps_s.items():
            # Those that were left off may not have come to it.
            assert last["seconds"][phase] >= 0.5 * sleep_s * last["shards"]
        assert last["seconds"]["fetching"] + last["seconds"]["pushing"] < 0.5 * spent_s
    # The first one has one life, the second one two and nobody in between.
    first_pids, second_pids = ({each[number]["pid"] for each in taken} for number in (1, 2))
    assert len(first_pids) == 1
    assert len(second_pids - {None}) == 2
    seen = [tuple(state) for state in found["seen"]]
    assert ("starting", True) in seen
    assert seen.index(("starting", True)) < seen.index(("starting", False))
    assert {("forward", False), ("backward", False), ("waiting", False)} <= set(seen)
    # A life's start is no work: it is no part of the second one's other phases.
    before, after = ([s["seconds"]["starting"] for s in each[1:]] for each in (taken[0], taken[-1]))
    assert after[0] == before[0]
    assert after[1] > before[1]
