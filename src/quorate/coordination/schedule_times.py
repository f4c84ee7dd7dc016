"""Times and memory of a schedule, and the inputs of its actions.

The forward of stage s needs the forward of stage s - 1. A backward needs the shard's own forward,
and the backward of stage s + 1, or the part with the gradient of the input. The gradients of
parameters need the stage's own first part. Tensors that skip stages travel along with these.

A device computes one action at a time; its results travel while the device computes the next
action. 1F1B, and all forward, all backward, take (m + p - 1) times the time of a stage for a shard,
for m shards through p equal stages: m / (m + p - 1) of the devices' time is work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from quorate.coordination.pipeline_schedules import Action, Row, Rows, Work

SECOND_HALF = {Work.BACKWARD, Work.BACKWARD_WEIGHT}  # a shard's activations end with it


def stages_of(rows: Rows) -> int:
    """Return S, how many stages there are."""
    return 1 + max(action.stage for row in rows for action in row)


def shards_of(rows: Rows) -> int:
    """Return m, how many shards there are."""
    return 1 + max(action.shard for row in rows for action in row)


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


def in_order(rows: Rows) -> Iterator[tuple[int, Action]]:
    """Yield device and action, each as early as the row and the needed actions allow.

    Raises:
        ValueError: the rest waits for each other.
    """
    everything = frozenset(action for row in rows for action in row)
    done: set[Action] = set()
    turn = [0] * len(rows)
    moved = True
    while moved:
        moved = False
        for device, row in enumerate(rows):
            while turn[device] < len(row):
                action = row[turn[device]]
                if not done.issuperset(needs(action, everything)):
                    break
                yield device, action
                done.add(action)
                turn[device] += 1
                moved = True
    stuck = [
        f"device {device} at the {row[turn[device]]}"
        for device, row in enumerate(rows)
        if turn[device] < len(row)
    ]
    if stuck:
        raise ValueError(f"a schedule that nobody can go on with: {', '.join(stuck)}")


def check(rows: Rows) -> None:
    """Check the order and completeness of a schedule.

    Raises:
        ValueError: an action is missing or there twice, a stage is on two devices, or devices wait
            for each other.
    """
    count = Counter(action for row in rows for action in row)
    device_of: dict[int, int] = {}
    for device, row in enumerate(rows):
        for action in row:
            if device_of.setdefault(action.stage, device) != device:
                devices = f"devices {device_of[action.stage]} and {device}"
                raise ValueError(f"stage {action.stage} is on {devices}")
    for stage in range(stages_of(rows)):
        for shard in range(shards_of(rows)):
            done = [work for work in Work for _ in range(count[Action(work, stage, shard)])]
            halves = [Work.FORWARD, Work.BACKWARD_INPUT, Work.BACKWARD_WEIGHT]
            if done not in ([Work.FORWARD, Work.BACKWARD], halves):
                got = ", ".join(work.value for work in done) or "nothing"
                raise ValueError(f"of shard {shard} in stage {stage} there is {got}")
    for _ in in_order(rows):
        pass


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
        part = {
            Work.BACKWARD_INPUT: self.input_part,
            Work.BACKWARD_WEIGHT: 1 - self.input_part,
        }
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
    free = [0.0] * len(rows)
    end: dict[Action, float] = {}
    spans = []
    for device, action in in_order(rows):
        begin = free[device]
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
