"""Timelines: when each action of a schedule would be computed, with given times of its parts.

A device computes one action at a time; what it hands over travels while it computes the next. Of m
shards through p stages that take the same time, 1F1B and all forward, all backward take
(m + p - 1) times what one stage needs for one shard: m / (m + p - 1) of the devices' time is work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from quorate.coordination.schedules.action import Action, Rows, Work
from quorate.coordination.schedules.dependencies import in_order, needs, placement


@dataclass(frozen=True)
class Times:
    """How long the parts take, in any unit of time.

    Args:
        forward: of a shard in each stage, (S,); or of any stage.
        backward: likewise, of the whole of it.
        transfer: from a device to another, of what one stage hands to the next.
        input_part: which part of a backward yields the gradient of the input, where it is in two.
    """

    forward: float | tuple[float, ...] = 1.0
    backward: float | tuple[float, ...] = 2.0
    transfer: float = 0.0
    input_part: float = 0.5

    def of(self, action: Action) -> float:
        """Return how long it takes."""
        whole = self.forward if action.work is Work.FORWARD else self.backward
        seconds = whole[action.stage] if isinstance(whole, tuple) else whole
        part = {
            Work.BACKWARD_INPUT: self.input_part,
            Work.BACKWARD_WEIGHT: 1 - self.input_part,
        }
        return seconds * part.get(action.work, 1.0)


class Span(NamedTuple):
    """An action, from its begin to its end."""

    device: int
    action: Action
    begin: float
    end: float


def timeline(rows: Rows, times: Times) -> list[Span]:
    """Return when each action is computed, the first at time 0.

    Raises:
        ValueError: devices wait for each other.
    """
    everything = frozenset(action for row in rows for action in row)
    device_of = placement(rows)
    free = [0.0] * len(rows)
    end: dict[Action, float] = {}
    spans = []
    for device, action in in_order(rows):
        begin = free[device]
        for needed in needs(action, everything):
            far = times.transfer if device_of[needed.stage] != device else 0.0
            begin = max(begin, end[needed] + far)
        end[action] = free[device] = begin + times.of(action)
        spans.append(Span(device, action, begin, end[action]))
    return spans


def makespan(rows: Rows, times: Times) -> float:
    """Return how long all of it takes, from the first begin to the last end."""
    return max(span.end for span in timeline(rows, times))


def bubble(rows: Rows, times: Times) -> float:
    """Return which part of all devices' time nobody works in: 0 is none of it."""
    spans = timeline(rows, times)
    work = sum(span.end - span.begin for span in spans)
    return 1 - work / (len(rows) * max(span.end for span in spans))
