"""All forward, all backward: every shard goes forward, then every shard backward.

Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism",
NeurIPS 2019. Its bubble is that of 1F1B, and a stage holds the activations of all m shards. It asks
for the least of those who move tensors: they go one way, then the other.
"""

from __future__ import annotations

from quorate.coordination.schedules.action import Action, Row, Rows, Work, one_stage_a_device


def schedule(stages: int, shards: int, *, devices: int | None = None) -> Rows:
    """Return the rows: m forwards, then m backwards, both from shard 0 on."""
    one_stage_a_device("gpipe", stages, shards, devices)
    return tuple(_row(stage, shards) for stage in range(stages))


def _row(stage: int, shards: int) -> Row:
    return tuple(
        Action(work, stage, shard)
        for work in (Work.FORWARD, Work.BACKWARD)
        for shard in range(shards)
    )
