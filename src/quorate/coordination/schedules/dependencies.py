"""Dependencies: what an action needs, and whether a schedule can be computed in its order.

The forward of stage s needs that of stage s - 1. A backward needs the shard's own forward, and the
backward of stage s + 1, or that part of it which yields the gradient of its input. The gradients of
parameters need the stage's own first part. What skips stages goes along with them: it is there
where the stage before is done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from quorate.coordination.schedules.action import Action, Rows, Work

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
    """Return the actions that must be done before: of this stage, and of a neighbour.

    Args:
        action: which is asked about.
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
    """Yield device and action, each as early as its row and what it needs allow.

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
    """See to it that a schedule can be computed, and computes everything once.

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
