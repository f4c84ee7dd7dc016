"""Scripted coordinators: what tests of single decisions share.

Legend: V shards of a step, N workers. w0 is worker 0, and (2, 5) is shard 5 of step 2.
"""

from __future__ import annotations

from collections.abc import Iterable

from quorate.coordination.coordinator import Coordinator
from quorate.coordination.protocol import (
    Applied,
    Apply,
    Done,
    Effect,
    Event,
    Joined,
)
from quorate.coordination.rules import Rule, Sync

HOME = "home shard"
FREE = "nobody has begun it"
ENDED = "all steps are done"


def behind(worker: int) -> str:
    return f"worker {worker} is slow: far behind its usual time"


def slow(worker: int) -> str:
    return f"worker {worker} is slow"


def coordinator(
    shards: int,
    steps: int = 1,
    *,
    joined: int = 0,
    attempts: int = 2,
    timeout_s: float | None = None,
) -> Coordinator:
    """A coordinator of ``steps`` steps, and workers 0 to ``joined`` - 1 that joined at time 0."""
    made = Coordinator(
        shards_of=lambda step: shards,
        first_step=0,
        last_step=steps,
        rule=Sync(),
        attempts=attempts,
        timeout_s=timeout_s,
    )
    for worker in range(joined):
        made.handle(Joined(worker), 0.0)
    return made


def handle_all(coordinator: Coordinator, now: float, *events: Event) -> list[Effect]:
    """All effects of some events at one time."""
    return [effect for event in events for effect in coordinator.handle(event, now)]


def applied(effects: Iterable[Effect]) -> tuple[int, tuple[int, ...], int]:
    """Of the one ``Apply`` among the effects: the step, the shards in it, the staleness."""
    [found] = [effect for effect in effects if isinstance(effect, Apply)]
    return found.step, found.shards, found.staleness


def straggling(attempts: int = 2, timeout_s: float | None = None) -> Coordinator:
    """V = 2, N = 3: w0 and w1 took 1 s each in step 0; w1 began (1, 1) at 10 and is not back."""
    c = coordinator(shards=2, steps=4, joined=3, attempts=attempts, timeout_s=timeout_s)
    handle_all(c, 1.0, Done(0, 0, 0), Done(1, 0, 1))
    c.handle(Applied(0), 10.0)
    return c


def by_shard(
    rule: Rule,
    steps: int = 99,
    *,
    joined: int,
    first_step: int = 0,
    left_open: Iterable[int] = (),
) -> Coordinator:
    """A rule that applies shards one by one; each is at home everywhere."""
    made = Coordinator(
        shards_of=lambda step: 1,
        home_shards=lambda rank_of, step: range(1),
        first_step=first_step,
        last_step=steps,
        left_open=left_open,
        rule=rule,
    )
    for worker in range(joined):
        made.handle(Joined(worker), 0.0)
    return made
