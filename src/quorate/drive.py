"""The drive: carries out the coordinator's effects over a transport, and tells it what happens."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from quorate.coordinator import (
    Abort,
    Applied,
    Apply,
    Coordinator,
    Effect,
    Finish,
    Tick,
    Wake,
)
from quorate.transports import Channel, Part


class Ready(NamedTuple):
    """Enough of a step is in: time for its update."""

    step: int
    parts: list[Part]


def drive(
    coordinator: Coordinator, channel: Channel, clock: Callable[[], float] = time.monotonic
) -> Iterator[Ready]:
    """Run the coordinator to its end.

    Yields each step that is ready for its update; the update counts as applied when the next one
    is asked for.

    Raises:
        Whatever user code raised in a shard that failed beyond repair.
    """
    wake_at: float | None = None
    while True:
        event = channel.receive(None if wake_at is None else max(0.0, wake_at - clock()))
        effects: deque[Effect] = deque(coordinator.handle(event or Tick(), clock()))
        wake_at = None
        while effects:
            match effects.popleft():
                case Wake(at):
                    wake_at = at
                case Apply(step, holders):
                    yield Ready(step, channel.collect(step, holders))
                    effects.extend(coordinator.handle(Applied(step), clock()))
                case Abort(worker, step, shard):
                    raise channel.error(worker, step, shard)
                case Finish():
                    return
                case effect:
                    channel.send(effect)
