"""Actions: one piece of work of a pipeline, of one stage for one shard.

Legend: S stages, p devices, m shards.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from quorate.errors import SettingError


class Work(Enum):
    """What is computed.

    The backward pass of a stage is either one piece, or two: first the gradient of the stage's
    input, which the stage before waits for, later the gradients of its parameters, which nobody
    does before the update.
    """

    FORWARD = "forward"
    BACKWARD = "backward"  # the whole of it
    BACKWARD_INPUT = "backward input"
    BACKWARD_WEIGHT = "backward weight"


class Action(NamedTuple):
    """A piece of work: of a stage, for a shard."""

    work: Work
    stage: int
    shard: int  # its position in the run of shards, 0 .. m-1

    def __str__(self) -> str:
        """Return it as a message shows it: ``forward of shard 3 in stage 1``."""
        return f"{self.work.value} of shard {self.shard} in stage {self.stage}"


Row = tuple[Action, ...]  # what a device computes, in order
Rows = tuple[Row, ...]  # (p,): one of each device


def sizes(name: str, stages: int, shards: int, devices: int | None) -> int:
    """Return p, the number of devices, after a look at all three.

    Raises:
        SettingError: one of them is below 1, or the stages cannot be dealt to the devices evenly.
    """
    devices = stages if devices is None else devices
    if min(stages, shards, devices) < 1 or stages % devices:
        got = f"{name} with {stages} stages on {devices} devices, {shards} shards"
        fix = "cut the model into as many stages as there are devices, or a multiple of it"
        raise SettingError("schedule", got, "at least one of each, as many on each device", fix)
    return devices


def one_stage_a_device(name: str, stages: int, shards: int, devices: int | None) -> None:
    """Look at the sizes of a schedule in which a device has one stage, of its own number.

    Raises:
        SettingError: there are not as many devices as stages.
    """
    if sizes(name, stages, shards, devices) != stages:
        got = f"{name} with {stages} stages on {devices} devices"
        fix = "cut the model into fewer stages, or take interleaved"
        raise SettingError("schedule", got, "a device for each stage", fix)
