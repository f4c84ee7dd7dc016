"""Costs: what `quorate plan` has to know beside the speed of a script, by runs of their own.

Cores that are shared: as many copies of the run at once as there are cores, none of which knows of
the others. Updates one shard at a time: the run under ``async``. Checkpoints: a run that saves each
second, whose loop stands still for longer between updates than that of one without. A worker that
is lost: killed at the end of that run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from quorate.commands.bench.contenders import Contender
from quorate.commands.bench.measured import Measured
from quorate.commands.bench.runs import Program, run
from quorate.coordination.rules import parse
from quorate.errors import CheckpointError
from quorate.services.checkpoints import files
from quorate.services.display.shard_time import WORK

MOST_COPIES = 8
SAVE_EVERY_S = 1.0


class Saves(NamedTuple):
    """What saves did to a run."""

    every_s: float  # between two, mean
    took_s: float  # until one was on the disk, median


def costs(
    program: Program,
    contender: Contender,
    shards: int,
    base: Sequence[Measured],
    log: Path,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Measure what a plan has to know, and return it for JSON. Blocks.

    Args:
        contender: with the fewest workers.
        shards: of all runs.
        base: its runs.
        log: where all that a run printed is left, if it fails.
        say: how it goes.

    Raises:
        UserError, RunError: see ``run``.
    """
    found: dict[str, Any] = {"workers": contender.workers}
    first = base[0]
    # 1. Cores.
    on_cpu = all(worker.device == "cpu" for worker in first.workers)
    copies = min(first.cores // first.threads, MOST_COPIES)
    if on_cpu and contender.workers == 1 and copies > 1:
        say(f"costs: {copies} copies at once")
        beside = _at_once(copies, program, contender, shards, log)
        times = fmean(map(shard_s, beside)) / median(map(shard_s, base))
        found["crowding"] = {"copies": copies, "times": max(1.0, times)}
        found["copies"] = [asdict(one) for one in beside]
    # 2. Updates one shard at a time.
    if not parse(first.update).by_shard and first.engine in ("towers", "processes", "ray"):
        say("costs: async")
        measured = run(program, contender, shards, log, more={"update": "async"})
        rows_per_s = measured.examples_per_s
        found["by_shard"] = {"runs": [asdict(measured)], "examples_per_s": rows_per_s}
    # 3. Checkpoints, and a worker that is lost.
    say("costs: a checkpoint each second, and a worker that is killed")
    seen: list[Saves] = []

    def look(run_dir: Path) -> None:
        with suppress(OSError, CheckpointError):
            seen.extend(saves_in(run_dir))

    more = {"save_every_s": SAVE_EVERY_S, "profile_kill": True}
    measured = run(program, contender, shards, log, more=more, look=look)
    if seen:
        usual_s = median(one.beside_s / one.updates for one in base)
        stood_s = max(0.0, measured.beside_s - usual_s * measured.updates)
        stall_s = stood_s / (measured.seconds / seen[0].every_s)
        found["saving"] = {"stall_s": stall_s, **seen[0]._asdict()}
    if measured.restart_s is not None:
        found["failing"] = {
            "detection_s": measured.detection_s,
            "restart_s": measured.restart_s,
        }
    return found


def shard_s(measured: Measured) -> float:
    """Return the mean of a shard's work, in seconds."""
    work_s = sum(worker.seconds[phase] for worker in measured.workers for phase in WORK)
    return work_s / max(1, sum(worker.shards for worker in measured.workers))


def saves_in(run_dir: Path) -> list[Saves]:
    """Return how often a run saved of late, by the checkpoints that it kept; none if that is one.

    Raises:
        OSError, CheckpointError: one of them cannot be read.
    """
    begun_s, took_s = [], []
    for path, _ in files.newest_first(run_dir)[::-1]:
        begun_s.append(float(files.record_of(path)["saved_at"]))
        took_s.append(max(0.0, (path / files.MARKER).stat().st_mtime - begun_s[-1]))
    # The last one may be that of the end, which came when it came.
    between_s = [after - before for before, after in pairwise(begun_s[:-1])]
    return [Saves(fmean(between_s), median(took_s))] if between_s else []


def _at_once(
    copies: int, program: Program, contender: Contender, shards: int, log: Path
) -> list[Measured]:
    """Run a script several times at once. All end when one fails, or this thread is interrupted."""
    stopped = threading.Event()

    def one(_: int) -> Measured:
        try:
            return run(program, contender, shards, log, is_stopped=stopped.is_set)
        except BaseException:
            stopped.set()
            raise

    with ThreadPoolExecutor(copies) as pool:
        try:
            return list(pool.map(one, range(copies)))
        except BaseException:
            stopped.set()
            raise
