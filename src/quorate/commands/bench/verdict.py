"""The verdict: the reason why some number of workers is not faster, in words."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from quorate.commands.bench import stages
from quorate.commands.bench.measured import Measured
from quorate.commands.bench.split import Split, compute_s
from quorate.services.display.shard_time import WORK, ShardTime, duration
from quorate.services.display.straggler import described, slow

LEAST_COST = 0.1  # share of a step: a cheaper part is not called the bottleneck
LEAST_OTHERS = 0.25  # cores used by unrelated programs
LONGER = 1.1  # times a shard's time with fewer workers


class Finding(NamedTuple):
    """A cost in the time of a step."""

    name: str  # straggler, or a part of the split
    cost: float  # approximate share of a step's time saved without the cost
    words: str


def findings(runs: Sequence[Measured], split: Split, base: Sequence[Measured]) -> list[Finding]:
    """Return the costs in words, the bottleneck first; there is always at least one.

    The bottleneck is the greatest cost, if at least ``LEAST_COST`` of a step; else the computation,
    which is the purpose of the step.

    Args:
        runs: repeats of one contender.
        split: the split of its median run.
        base: repeats of the contender with the fewest workers.
    """
    costly = [*_stragglers(runs), *_parts(runs[0], split), *_evaluation(runs)]
    names = {finding.name for finding in costly}
    if "straggler" not in names:
        costly += _waiting(runs[0], split)
    costly += _longer(runs, split, base)
    costly = sorted((f for f in costly if f.cost >= LEAST_COST), key=lambda f: -f.cost)
    return costly or [_compute(split)]


def notes(run: Measured) -> list[str]:
    """Return further remarks about a contender."""
    lines: list[str] = []
    if run.pipeline is not None and run.workers:
        devices = len(run.workers[0].devices)
        lines += stages.lines(run.stages, run.pipeline, devices, run.step_s)
    cpu = sum(worker.devices.count("cpu") for worker in run.workers)
    if cpu * run.threads > run.cores:
        lines.append(f"more workers than cores: {_cores(run)}")
    if run.update == "sync" and len(run.workers) > run.shards:
        lines.append(
            f"more workers than shards: {len(run.workers) - run.shards} of {len(run.workers)} only "
            "step in for others; raise shards"
        )
    if run.others_cores >= LEAST_OTHERS:
        lines.append(
            f"other programs used {run.others_cores:.1f} of this machine's cores meanwhile"
        )
    if again := [w.worker for w in run.workers if w.seconds["starting"] > 0]:
        listed = ", ".join(map(str, again))
        lines.append(f"worker {listed} ended in the measured time, and was started again")
    return lines


def _stragglers(runs: Sequence[Measured]) -> list[Finding]:
    times = _times(runs)
    devices = {worker.worker: worker.device for worker in runs[0].workers}
    listed = []
    late = slow(times)
    known = {w: t.shard_s for w, t in times.items() if t.shard_s}
    usual = known | {straggler.worker: straggler.usual_shard_s for straggler in late}
    speed, without = (sum(1 / s for s in shard_s.values()) for shard_s in (known, usual))
    for straggler in late:
        words = f"straggler: {described(straggler, devices[straggler.worker])}"
        listed.append(Finding("straggler", 1 - speed / without, words))
    for worker in runs[0].workers:
        if times[worker.worker].shard_s is None and len(known) > 0:
            seconds = {n: worker.seconds[n] for n in WORK}
            phase = max(seconds, key=lambda name: seconds[name])
            if seconds[phase] > runs[0].seconds / 2:
                words = (
                    f"straggler: worker {worker.worker} ({worker.device}) finished nothing in "
                    f"{duration(runs[0].seconds)}; in {phase}"
                )
                listed.append(Finding("straggler", 1 / len(times), words))
    return listed


def _times(runs: Sequence[Measured]) -> dict[int, ShardTime]:
    """Return for each worker the median over the runs of the time per shard."""
    by_worker = {}
    for number in range(len(runs[0].workers)):
        per_shard = [
            {phase: w.seconds[phase] / w.shards for phase in WORK}
            for run in runs
            if (w := run.workers[number]).shards > 0
        ]
        shards = min(run.workers[number].shards for run in runs)
        phases_s = {p: median(times[p] for times in per_shard) for p in WORK} if per_shard else {}
        shard_s = median(sum(times.values()) for times in per_shard) if per_shard else None
        by_worker[number] = ShardTime(shards, shard_s, phases_s, None)
    return by_worker


def _parts(run: Measured, split: Split) -> list[Finding]:
    share = {part: f"{of:.0%} of a step" for part, of in split.items()}
    wait = "workers wait" if len(run.workers) > 1 else "the worker waits"
    loaders = run.loader_workers
    rare = "a larger batch makes fewer updates"
    words = {
        "input": f"input: {wait} {share['input']} for rows; turn loader_workers up (it is "
        f"{loaders})" + (", as long as cores are free" if loaders else ""),
        "exchange": f"exchange: handing gradients over and adding them up takes {share['exchange']}"
        f"; {rare}" + (", fewer shards make fewer sums" if run.shards > len(run.workers) else ""),
        "update": f"update: the optimizer takes {share['update']} on the coordinator, while "
        f"{wait}; {rare}",
        "other": f"other: what the program does between two updates takes {share['other']}: "
        "callbacks, logs, saves, the body of the loop",
    }
    return [Finding(name, split[name], text) for name, text in words.items()]


def _evaluation(runs: Sequence[Measured]) -> list[Finding]:
    share = median(run.evaluation_s / (run.evaluation_s + run.seconds) for run in runs)
    words = f"evaluation: it takes {share:.0%} of the run; evaluate less often"
    return [Finding("evaluation", share, words)]


def _waiting(run: Measured, split: Split) -> list[Finding]:
    shards, workers = run.shards, len(run.workers)
    if workers == 1:
        words = f"waiting: the worker waits {split['waiting']:.0%} of a step for messages"
        return [Finding("waiting", split["waiting"], words)]
    words = f"waiting: workers wait {split['waiting']:.0%} of a step for each other"
    if run.update == "sync" and shards % workers:
        words += (
            f": {shards} shard{'s' if shards > 1 else ''} cannot be dealt evenly to {workers} "
            f"workers; choose shards={-(-shards // workers) * workers}"
        )
    elif run.update.startswith("bounded"):
        words += ", as the bound on staleness demands; raise it"
    else:
        words += " and for messages"
    return [Finding("waiting", split["waiting"], words)]


def _longer(runs: Sequence[Measured], split: Split, base: Sequence[Measured]) -> list[Finding]:
    """Return a finding if shards take longer than with fewer workers: something is shared."""
    now_s, before_s = (median(map(compute_s, repeats)) for repeats in (runs, base))
    run, workers, fewer = runs[0], len(runs[0].workers), len(base[0].workers)
    kinds = [
        {worker.device.partition(":")[0] for worker in repeat.workers} for repeat in (run, base[0])
    ]
    if workers <= fewer or kinds[0] != kinds[1] or not 0 < before_s * LONGER < now_s:
        return []
    words = (
        f"compute: a shard takes {now_s / before_s:.2f} times as long as with {fewer} "
        f"worker{'s' if fewer > 1 else ''}, {duration(now_s)} against {duration(before_s)}: "
    )
    if kinds[0] == {"cpu"} and workers * run.threads > run.cores:
        words += _cores(run)
    else:
        words += "they share memory bandwidth, the clock or cores with each other or other programs"
        words += ", and Python's lock" if run.engine == "towers" else ""
    return [Finding("compute", split["compute"] * (1 - before_s / now_s), words)]


def _compute(split: Split) -> Finding:
    words = (
        f"compute: forward and backward take {split['compute']:.0%} of a step, and nothing else "
        f"{LEAST_COST:.0%}"
    )
    return Finding("compute", split["compute"], words)


def _cores(run: Measured) -> str:
    threads = f"{run.threads} thread{'s' if run.threads > 1 else ''}"
    cores = f"{run.cores} core{'s' if run.cores > 1 else ''}"
    workers = f"{len(run.workers)} worker{'s' if len(run.workers) > 1 else ''}"
    return f"{workers} of {threads} share {cores}"
