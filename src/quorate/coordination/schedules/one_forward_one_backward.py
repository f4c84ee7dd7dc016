"""1F1B: after a few forwards to fill the pipeline, one forward and one backward in turn.

Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019, with
the flush at the end of a step of "Efficient Large-Scale Language Model Training on GPU Clusters
Using Megatron-LM", SC 2021 (2104.04473), section 2.2. The bubble is that of all forward, all
backward: of m shards through p stages alike, m / (m + p - 1) of the time is work. But stage s holds
the activations of p - s shards at most, however many there are: a shard's backward comes as soon as
it can.
"""

from __future__ import annotations

from quorate.coordination.schedules.action import Action, Row, Rows, Work, one_stage_a_device


def schedule(stages: int, shards: int, *, devices: int | None = None) -> Rows:
    """Return the rows: of stage s, p - 1 - s forwards, then forward and backward in turn."""
    one_stage_a_device("1f1b", stages, shards, devices)
    return tuple(_row(stage, shards, ahead=stages - 1 - stage) for stage in range(stages))


def _row(stage: int, shards: int, ahead: int) -> Row:
    row = [Action(Work.FORWARD, stage, shard) for shard in range(min(ahead, shards))]
    for shard in range(shards):
        if shard + ahead < shards:
            row.append(Action(Work.FORWARD, stage, shard + ahead))
        row.append(Action(Work.BACKWARD, stage, shard))
    return tuple(row)
