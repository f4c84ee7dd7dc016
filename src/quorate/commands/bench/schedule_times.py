"""Times of a pipeline's schedule: when each action is computed, and how long devices are idle.

The actions take given times, and begin in turn, as soon as their inputs are present: see
``coordination/pipeline_schedules.py``. Pure.

Legend: S stages, p devices, m shards.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from quorate.coordination.pipeline_schedules import Action, Row, Rows, Work

SECOND_HALF = {Work.BACKWARD, Work.BACKWARD_WEIGHT}  # a shard's activations end with it


def stages_of(rows: Rows) -> int:
    """Return S, how many stages there are."""
    return 1 + max(action.stage for row in rows for action in row)


def placement(rows: Rows) -> tuple[int, ...]:
    """Return the device of each stage, (S,)."""
    device = {action.stage: r for r, row in enumerate(rows) for action in row}
    return tuple(device[stage] for stage in range(stages_of(rows)))


def needs(action: Action, rows_have: set[Action] | frozenset[Action]) -> list[Action]:
    """Return the actions to be done before, of the same stage and of a neighbor.

    Args:
        action: the later action.
        rows_have: all actions of the schedule; they tell which backwards are in two parts.
    """
    work, stage, shard = action
    if work is Work.FORWARD:
        return [Action(work, stage - 1, shard)] if stage else []
    if work is Work.BACKWARD_WEIGHT:
        return [Action(Work.BACKWARD_INPUT, stage, shard)]
    after = (Action(owed, stage + 1, shard) for owed in (Work.BACKWARD, Work.BACKWARD_INPUT))
    return [Action(Work.FORWARD, stage, shard), *(owed for owed in after if owed in rows_have)]


def in_flight(rows: Rows) -> tuple[int, ...]:
    """Return the most shards whose activations a stage holds at a time, of each stage, (S,)."""
    return tuple(
        max(most_held(tuple(action for action in row if action.stage == stage)) for row in rows)
        for stage in range(stages_of(rows))
    )


def most_held(row: Row) -> int:
    """Return the most shards whose activations a device holds at a time, over all its stages."""
    held = most = 0
    for action in row:
        held += (action.work is Work.FORWARD) - (action.work in SECOND_HALF)
        most = max(most, held)
    return most


@dataclass(frozen=True)
class ActionTimes:
    """Durations of the parts, in any unit of time.

    Args:
        forward: of a shard in each stage, (S,); or of any stage.
        backward: of both parts together, (S,); or of any stage.
        transfer: of a stage's result to the next stage on another device.
        input_part: share of a divided backward spent on the gradient of the input.
    """

    forward: float | tuple[float, ...] = 1.0
    backward: float | tuple[float, ...] = 2.0
    transfer: float = 0.0
    input_part: float = 0.5

    def of(self, action: Action) -> float:
        """Return the duration of an action."""
        whole = self.forward if action.work is Work.FORWARD else self.backward
        seconds = whole[action.stage] if isinstance(whole, tuple) else whole
        part = {Work.BACKWARD_INPUT: self.input_part, Work.BACKWARD_WEIGHT: 1 - self.input_part}
        return seconds * part.get(action.work, 1.0)


class ActionSpan(NamedTuple):
    """An action, from begin to end."""

    device: int
    action: Action
    begin: float
    end: float


def timeline(rows: Rows, times: ActionTimes) -> list[ActionSpan]:
    """Return when each action is computed, the first at time 0.

    Raises:
        ValueError: devices wait for each other.
    """
    everything = frozenset(action for row in rows for action in row)
    device_of = placement(rows)
    waiting = [deque(row) for row in rows]
    free = [0.0] * len(rows)
    end: dict[Action, float] = {}
    spans = []
    while any(waiting):
        ready = [
            device
            for device, row in enumerate(waiting)
            if row and end.keys() >= set(needs(row[0], everything))
        ]
        if not ready:
            stuck = [f"device {r} at the {row[0]}" for r, row in enumerate(waiting) if row]
            raise ValueError(f"a schedule that nobody can go on with: {', '.join(stuck)}")
        for device in ready:
            action, begin = waiting[device].popleft(), free[device]
            for needed in needs(action, everything):
                far = times.transfer if device_of[needed.stage] != device else 0.0
                begin = max(begin, end[needed] + far)
            end[action] = free[device] = begin + times.of(action)
            spans.append(ActionSpan(device, action, begin, end[action]))
    return spans


def makespan(rows: Rows, times: ActionTimes) -> float:
    """Return the time from the first begin to the last end."""
    return max(span.end for span in timeline(rows, times))


def bubble(rows: Rows, times: ActionTimes) -> float:
    """Return the idle share of all devices' time, from 0 on."""
    spans = timeline(rows, times)
    work = sum(span.end - span.begin for span in spans)
    return 1 - work / (len(rows) * max(span.end for span in spans))
