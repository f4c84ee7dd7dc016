"""Costs: the inputs of `quorate plan` beside the speed of a script, measured by separate runs.

Shared cores: as many simultaneous copies of the run as there are cores, each unaware of the rest.
Updates one shard at a time: the run under ``async``. Checkpoints: a run with a save per second,
whose loop pauses between updates for longer than a run without saves. A lost worker: killed at the
end of the run with saves.
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
from quorate.commands.bench.runs import BenchProgram, run
from quorate.coordination.rules import parse
from quorate.errors import CheckpointError
from quorate.services.checkpoints import files
from quorate.services.display.shard_time import WORK

MOST_COPIES = 8
SAVE_EVERY_S = 1.0


class SaveCosts(NamedTuple):
    """The effect of saves on a run."""

    every_s: float  # mean interval between two saves
    took_s: float  # median time until a save is on disk


def costs(
    program: BenchProgram,
    contender: Contender,
    shards: int,
    base: Sequence[Measured],
    log: Path,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Measure the costs for a plan, and return the costs for JSON. Blocks.

    Args:
        contender: the contender with the fewest workers.
        shards: number of shards of all runs.
        base: the measured runs of the contender.
        log: file for the output of a failed run.
        say: receives messages about the progress.

    Raises:
        UserError, RunError: see ``run``.
    """
    found: dict[str, Any] = {"workers": contender.workers}
    first = base[0]
    # 1. Shared cores.
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
    # 3. Checkpoints, and a lost worker.
    say("costs: a checkpoint each second, and a worker that is killed")
    seen: list[SaveCosts] = []

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
    """Return the mean time of a shard's work, in seconds."""
    work_s = sum(worker.seconds[phase] for worker in measured.workers for phase in WORK)
    return work_s / max(1, sum(worker.shards for worker in measured.workers))


def saves_in(run_dir: Path) -> list[SaveCosts]:
    """Return the intervals of a run's saves, from its kept checkpoints; empty for fewer than three.

    Raises:
        OSError, CheckpointError: a checkpoint cannot be read.
    """
    begun_s, took_s = [], []
    for path, _ in files.newest_first(run_dir)[::-1]:
        begun_s.append(float(files.record_of(path)["saved_at"]))
        took_s.append(max(0.0, (path / files.MARKER).stat().st_mtime - begun_s[-1]))
    # Without the last checkpoint: it may be the save at the end, outside of the rhythm.
    between_s = [after - before for before, after in pairwise(begun_s[:-1])]
    return [SaveCosts(fmean(between_s), median(took_s))] if between_s else []


def _at_once(
    copies: int, program: BenchProgram, contender: Contender, shards: int, log: Path
) -> list[Measured]:
    """Run a script several times at once. One failure, or an interrupt, ends all copies."""
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
