"""Zero bubble, H1: the backward pass in two parts, of which the second fills what was a bubble.

Qi, Wan, Huang & Lin, "Zero Bubble Pipeline Parallelism", ICLR 2024 (2401.10241), section 2.2,
ZB-H1. The stage before waits for the gradient of an input alone; the gradients of the parameters
can be computed whenever there is nothing else to do. With times F, I and W of the three parts, the
bubble is (p - 1) (F + I - W), and 1F1B's (p - 1) (F + I + W).

Stage s goes p - 1 - s forwards ahead, as in 1F1B, and puts off parameters' gradients by s shards:
so every stage holds the activations of p shards at most, which is what the first stage of 1F1B
holds. (H2, which has no bubble at all, needs up to twice that.) Stage 0 puts off nothing, and
nobody waits for the gradient of its input: its backward passes stay whole.
"""

from __future__ import annotations

from quorate.coordination.schedules.action import Action, Row, Rows, Work, one_stage_a_device


def schedule(stages: int, shards: int, *, devices: int | None = None) -> Rows:
    """Return the rows: 1F1B's, with backward in two parts, the second of them s shards later."""
    one_stage_a_device("zero-bubble", stages, shards, devices)
    return tuple(_row(stage, shards, ahead=stages - 1 - stage) for stage in range(stages))


def _row(stage: int, shards: int, ahead: int) -> Row:
    first = Work.BACKWARD_INPUT if stage else Work.BACKWARD
    row = [Action(Work.FORWARD, stage, shard) for shard in range(min(ahead, shards))]
    for shard in range(shards):
        if shard + ahead < shards:
            row.append(Action(Work.FORWARD, stage, shard + ahead))
        row.append(Action(first, stage, shard))
        if stage and shard >= stage:
            row.append(Action(Work.BACKWARD_WEIGHT, stage, shard - stage))
    if stage:
        late = range(max(shards - stage, 0), shards)
        row += [Action(Work.BACKWARD_WEIGHT, stage, shard) for shard in late]
    return tuple(row)
