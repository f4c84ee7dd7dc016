"""Shard times: the time that a worker needs for a shard, from its status at two moments."""

from __future__ import annotations

from typing import NamedTuple

from quorate.engines.worker_status import PHASES, WorkerStatus

WORK = PHASES[PHASES.index("fetching") :]  # the phases of a shard's time


class ShardTime(NamedTuple):
    """The shard time of a worker over an interval."""

    shards: int  # begun in the interval
    shard_s: float | None  # seconds of work per shard; None if no shard was begun
    phases_s: dict[str, float]  # shard_s in each phase of WORK; empty if no shard was begun
    waiting: float | None  # share of the time with the worker present but without work, 0 to 1


def shard_time(before: WorkerStatus | None, after: WorkerStatus) -> ShardTime:
    """Return a worker's shard time between two statuses; without the first, since its start.

    A shard in progress counts as a whole shard if the shard was begun in the interval, with the
    time spent within the interval: over n shards the figure may be off by one part in n.
    """
    spent = dict(after.seconds)
    shards = after.shards
    if before is not None:
        spent = {phase: seconds - before.seconds[phase] for phase, seconds in spent.items()}
        shards -= before.shards
    work_s = sum(spent[phase] for phase in WORK)
    there_s = spent["waiting"] + work_s
    waiting = spent["waiting"] / there_s if there_s > 0 else None
    if shards <= 0:
        return ShardTime(0, None, {}, waiting)
    phases_s = {phase: spent[phase] / shards for phase in WORK}
    return ShardTime(shards, work_s / shards, phases_s, waiting)


def duration(seconds: float) -> str:
    """Return a time for people: ``3.1 ms``, ``0.31 s``, ``31 s``."""
    if seconds < 0.1:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:,.0f} s"
