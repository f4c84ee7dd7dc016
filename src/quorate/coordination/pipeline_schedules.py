"""Schedules of a pipeline, as plain data: the actions of each device, in order.

A model is cut into S stages, numbered from 0 along the forward pass. The shards of a step are its
micro-batches: each shard goes forward through the stages, and backward. A schedule is a row of
actions per device. An action begins in turn, as soon as its inputs are present. So a schedule says
nothing of time, and never changes the bits: the schedule decides how many activations are held, and
who waits. Sends are buffered: no device waits until a message is received.

The forward of stage s needs the forward of stage s - 1. A backward needs the shard's own forward,
and the backward of stage s + 1, or the part with the gradient of the input. The gradients of
parameters need the stage's own first part. Tensors that skip stages travel along with these.

A device computes one action at a time; its results travel while the device computes the next
action. 1F1B, and all forward, all backward, take (m + p - 1) times the time of a stage for a shard,
for m shards through p equal stages: m / (m + p - 1) of the devices' time is work.

``SCHEDULES`` has the schedules by the names on the command line.

Legend: S stages, p devices, m shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from itertools import pairwise
from typing import NamedTuple, Protocol

from quorate.errors import SettingError


class Work(Enum):
    """The kind of computation.

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
        """Return the text for messages: ``forward of shard 3 in stage 1``."""
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
    """Check the sizes of a schedule with a single stage on each device.

    Raises:
        SettingError: there are not as many devices as stages.
    """
    if sizes(name, stages, shards, devices) != stages:
        got = f"{name} with {stages} stages on {devices} devices"
        fix = "cut the model into fewer stages, or take interleaved"
        raise SettingError("schedule", got, "a device for each stage", fix)


class Schedule(Protocol):
    """A function that makes the rows of a schedule."""

    def __call__(self, stages: int, shards: int, *, devices: int | None = None) -> Rows:
        """Return a row of actions per device.

        Args:
            stages: S.
            shards: m.
            devices: p. None: as many as stages.

        Raises:
            SettingError: no such schedule exists for these numbers.
        """


def all_forward_all_backward(stages: int, shards: int, *, devices: int | None = None) -> Rows:
    """Return rows of m forwards, then m backwards, both from shard 0 on.

    Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism",
    NeurIPS 2019. The bubble is that of 1F1B, and a stage holds the activations of all m shards.
    Tensors go one way, then the opposite way: transport is at its simplest.
    """
    one_stage_a_device("gpipe", stages, shards, devices)
    works = (Work.FORWARD, Work.BACKWARD)
    return tuple(
        tuple(Action(work, stage, shard) for work in works for shard in range(shards))
        for stage in range(stages)
    )


def one_forward_one_backward(stages: int, shards: int, *, devices: int | None = None) -> Rows:
    """Return rows, for stage s, of p - 1 - s forwards, then forwards and backwards by turns.

    Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019,
    with the flush at the end of a step of "Efficient Large-Scale Language Model Training on GPU
    Clusters Using Megatron-LM", SC 2021 (2104.04473), section 2.2. As with all forward, all
    backward, m / (m + p - 1) of the time is work, for m shards through p equal stages. But stage s
    holds the activations of at most p - s shards, for any m: backwards come as early as possible.
    """
    one_stage_a_device("1f1b", stages, shards, devices)
    return tuple(_by_turns(stage, shards, ahead=stages - 1 - stage) for stage in range(stages))


def zero_bubble(stages: int, shards: int, *, devices: int | None = None) -> Rows:
    """Return the rows of 1F1B, with backward in two parts, the second part s shards later.

    Qi, Wan, Huang & Lin, "Zero Bubble Pipeline Parallelism", ICLR 2024 (2401.10241), section 2.2,
    ZB-H1. The stage before waits for the gradient of an input alone; the gradients of parameters
    fill idle time. With times F, I and W of the three parts, the bubble is (p - 1) (F + I - W),
    and (p - 1) (F + I + W) in 1F1B.

    Stage s goes p - 1 - s forwards ahead, as in 1F1B, and puts off parameters' gradients by s
    shards: so every stage holds the activations of at most p shards, as the first stage of 1F1B
    does. (H2, without any bubble, needs up to twice as much.) Stage 0 puts off nothing, and nobody
    waits for the gradient of its input: its backward passes stay whole.
    """
    one_stage_a_device("zero-bubble", stages, shards, devices)
    return tuple(
        _by_turns(stage, shards, ahead=stages - 1 - stage, put_off=stage) for stage in range(stages)
    )


def _by_turns(stage: int, shards: int, ahead: int, put_off: int = 0) -> Row:
    """Return forwards and backwards by turns.

    Args:
        ahead: number of forwards before the first backward.
        put_off: the gradients of parameters are computed so many shards later. 0: with the rest.
    """
    backward = Work.BACKWARD_INPUT if put_off else Work.BACKWARD
    row = [Action(Work.FORWARD, stage, shard) for shard in range(min(ahead, shards))]
    for shard in range(shards):
        if shard + ahead < shards:
            row.append(Action(Work.FORWARD, stage, shard + ahead))
        row.append(Action(backward, stage, shard))
        if put_off and shard >= put_off:
            row.append(Action(Work.BACKWARD_WEIGHT, stage, shard - put_off))
    rest = range(max(shards - put_off, 0), shards)
    return *row, *(Action(Work.BACKWARD_WEIGHT, stage, shard) for shard in rest)


def interleaved(stages: int, shards: int, *, devices: int | None = None) -> Rows:
    """Return rows of 1F1B with several stages ("chunks") per device: stage s is on device s mod p.

    Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM", SC 2021 (2104.04473), section 2.2. Device r has stages r, r + p, r + 2p, ...: v
    chunks, each a v-th of a stage without interleaving. The bubble is a v-th of that of 1F1B, for v
    times the transfers and more activations: a device is up to (v - 1) g + 2 (p - 1) chunks ahead.

    Shards go in groups of g: a device computes a group's shards in its first chunk, the same shards
    in its second, and so on, then the next group; backwards from the last chunk on. The paper wants
    m to be a multiple of p = g. Here m is any number: as many groups of at least p as m gives, of
    sizes that differ by at most 1, larger groups first. Larger groups first because of the last
    device: in its steady part, backward k of a group of g_j needs the forward (v - 1) g_j later,
    and the device is (v - 1) g_1 ahead, for a first group of g_1.

    As many devices as stages leave nothing to interleave. The result is then 1F1B: 2 (p - 1)
    forwards ahead would hold twice the activations for the same bubble.
    """
    devices = sizes("interleaved", stages, shards, devices)
    if devices == stages:
        return one_forward_one_backward(stages, shards)
    groups = _groups(shards, devices)
    return tuple(
        _interleaved_row(range(r, stages, devices), groups, devices - 1 - r) for r in range(devices)
    )


def _groups(shards: int, devices: int) -> list[range]:
    """Return the groups of shards, the larger ones first."""
    count = max(shards // devices, 1)
    size, more = divmod(shards, count)
    starts = [j * size + min(j, more) for j in range(count + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


def _interleaved_row(chunks: Sequence[int], groups: list[range], behind: int) -> Row:
    """Return the row of a device.

    Args:
        chunks: its stages, (v,).
        groups: of the shards.
        behind: how many devices come after it.
    """
    forwards = _in_groups(Work.FORWARD, chunks, groups)
    backwards = _in_groups(Work.BACKWARD, chunks[::-1], groups)
    ahead = min((len(chunks) - 1) * len(groups[0]) + 2 * behind, len(forwards))
    row = forwards[:ahead]
    for turn, backward in enumerate(backwards, start=ahead):
        row += [*forwards[turn : turn + 1], backward]
    return tuple(row)


def _in_groups(work: Work, chunks: Sequence[int], groups: list[range]) -> list[Action]:
    return [Action(work, stage, shard) for group in groups for stage in chunks for shard in group]


SCHEDULES: dict[str, Schedule] = {
    "1f1b": one_forward_one_backward,
    "gpipe": all_forward_all_backward,
    "interleaved": interleaved,
    "zero-bubble": zero_bubble,
}
