"""Results: medians over the repeats, speed-up, efficiency, and equality of the bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any, NamedTuple

from quorate.commands.bench.contenders import Contender
from quorate.commands.bench.measured import Measured
from quorate.commands.bench.split import Split, split
from quorate.commands.bench.verdict import Finding, findings, notes


class Result(NamedTuple):
    """The result of one contender."""

    contender: Contender
    runs: list[Measured]
    examples_per_s: float  # the median
    slowest: float  # examples/s
    fastest: float
    ratios: list[float]  # speed over the speed of the contender with the fewest workers, by round
    speed_up: float  # median of the ratios: free of drift between rounds
    efficiency: float  # speed-up per device of the workers
    step_s: float
    split: Split  # of the median run, or the slower of two
    findings: list[Finding]  # the bottleneck first
    notes: list[str]


class Proof(NamedTuple):
    """A comparison of the bits of runs after the same number of updates."""

    updates: int
    runs: int
    digests: list[str]  # the distinct digests; a single one: all runs have the same bits


def results(measured: Mapping[Contender, Sequence[Measured]]) -> list[Result]:
    """Return the results of all contenders, in order of the number of workers.

    Args:
        measured: the repeats of each contender, one per round.
    """
    order = sorted(measured, key=lambda contender: contender.workers)
    base = measured[order[0]]
    listed = []
    for contender in order:
        runs = list(measured[contender])
        by_speed = sorted(runs, key=lambda run: run.examples_per_s)
        middle = by_speed[(len(runs) - 1) // 2]
        ratios = [
            run.examples_per_s / least.examples_per_s for run, least in zip(runs, base, strict=True)
        ]
        parts = split(middle)
        listed.append(
            Result(
                contender=contender,
                runs=runs,
                examples_per_s=median(run.examples_per_s for run in runs),
                slowest=by_speed[0].examples_per_s,
                fastest=by_speed[-1].examples_per_s,
                ratios=ratios,
                speed_up=median(ratios),
                efficiency=median(ratios) * _devices(base[0]) / _devices(middle),
                step_s=median(run.step_s for run in runs),
                split=parts,
                findings=findings(runs, parts, base),
                notes=notes(middle),
            )
        )
    return listed


def proof(listed: Sequence[Result]) -> Proof | None:
    """Return the comparison of bits after the last update with a digest in all runs.

    None without such an update, or for several kinds of devices: equal bits are promised within one
    kind.
    """
    runs = [run for result in listed for run in result.runs]
    listed_devices = [d for run in runs for worker in run.workers for d in worker.devices]
    kinds = {device.partition(":")[0] for device in listed_devices}
    common = set.intersection(*(set(run.digests) for run in runs))
    if not common or len(kinds) > 1 or len(runs) < 2:
        return None
    n = max(common)
    return Proof(n, len(runs), sorted({run.digests[n] for run in runs}))


def _devices(run: Measured) -> int:
    """Return the number of devices of the workers; a shared device counts once per worker."""
    return sum(len(worker.devices) for worker in run.workers)


def to_json(listed: Sequence[Result]) -> list[dict[str, Any]]:
    """Return an object for JSON per contender."""
    records = []
    for result in listed:
        record = result._asdict()
        record["runs"] = [
            asdict(run) | {"examples_per_s": run.examples_per_s} for run in result.runs
        ]
        record["bottleneck"] = result.findings[0].words
        record["findings"] = [finding._asdict() for finding in result.findings]
        record |= result.contender._asdict() | {"contender": result.contender.label()}
        records.append(record)
    return records
