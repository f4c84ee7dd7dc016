"""Schedules of a pipeline: what each must keep, its closed forms, and torch's own beside it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.messages import expect_error

from quorate.coordination.schedules import SCHEDULES, Action, Rows, Work
from quorate.coordination.schedules.dependencies import check, placement, shards_of, stages_of
from quorate.coordination.schedules.memory import in_flight, in_flight_by_device
from quorate.coordination.schedules.timeline import Times, bubble, makespan, timeline
from quorate.errors import SettingError

pipelining = pytest.importorskip("torch.distributed.pipelining.schedules")

fixed = settings(max_examples=60, derandomize=True, deadline=None, database=None)

NAMES = sorted(SCHEDULES)
DEVICES = st.integers(1, 6)
SHARDS = st.integers(1, 20)
CHUNKS = st.integers(1, 4)


def rows_of(name: str, devices: int, shards: int, chunks: int) -> Rows:
    stages = devices * (chunks if name == "interleaved" else 1)
    return SCHEDULES[name](stages, shards, devices=devices)


@fixed
@given(st.sampled_from(NAMES), DEVICES, SHARDS, CHUNKS)
def test_everything_once_and_nobody_waits_forever(
    name: str, devices: int, shards: int, chunks: int
) -> None:
    rows = rows_of(name, devices, shards, chunks)
    check(rows)
    assert len(rows) == devices
    assert shards_of(rows) == shards
    assert placement(rows) == tuple(stage % devices for stage in range(stages_of(rows)))


@fixed
@given(st.sampled_from(NAMES), DEVICES, SHARDS, CHUNKS, st.data())
def test_a_timeline_keeps_what_an_action_needs(
    name: str, devices: int, shards: int, chunks: int, data: st.DataObject
) -> None:
    rows = rows_of(name, devices, shards, chunks)
    some = st.floats(0.1, 4.0)
    per_stage = st.lists(some, min_size=stages_of(rows), max_size=stages_of(rows)).map(tuple)
    times = Times(data.draw(per_stage), data.draw(per_stage), data.draw(st.floats(0.0, 2.0)))
    spans = {span.action: span for span in timeline(rows, times)}
    for row in rows:
        for before, after in pairwise(row):
            assert spans[before].end <= spans[after].begin
    last = stages_of(rows) - 1
    for (work, stage, shard), span in spans.items():
        if work is Work.FORWARD:
            sources = [Action(work, stage - 1, shard)]
        elif work is Work.BACKWARD_WEIGHT:
            sources = [Action(Work.BACKWARD_INPUT, stage, shard)]
        else:
            owed = Work.BACKWARD if name != "zero-bubble" else Work.BACKWARD_INPUT
            sources = [Action(Work.FORWARD, stage, shard), Action(owed, stage + 1, shard)]
        for source in sources:
            if 0 <= source.stage <= last:
                far = times.transfer if spans[source].device != span.device else 0.0
                assert spans[source].end + far <= span.begin
    busy = sum(span.end - span.begin for span in spans.values())
    whole = makespan(rows, times)
    assert bubble(rows, times) == pytest.approx(1 - busy / (devices * whole))


@fixed
@given(DEVICES, SHARDS)
def test_what_is_held(devices: int, shards: int) -> None:
    first = [min(devices - stage, shards) for stage in range(devices)]
    assert list(in_flight(SCHEDULES["1f1b"](devices, shards))) == first
    assert set(in_flight(SCHEDULES["gpipe"](devices, shards))) == {shards}
    # Nowhere more than what the first stage of 1F1B holds.
    assert max(in_flight(SCHEDULES["zero-bubble"](devices, shards))) <= min(devices, shards)


@fixed
@given(st.sampled_from(["1f1b", "interleaved", "zero-bubble"]), DEVICES, CHUNKS)
def test_what_is_held_does_not_grow_with_the_shards(name: str, devices: int, chunks: int) -> None:
    held = [in_flight(rows_of(name, devices, k * devices, chunks)) for k in (3, 4, 12)]
    assert held[0] == held[1] == held[2]


@fixed
@given(DEVICES, SHARDS, CHUNKS)
def test_a_device_of_interleaved_holds_a_bounded_number(
    devices: int, shards: int, chunks: int
) -> None:
    rows = rows_of("interleaved", devices, shards, chunks)
    group = -(-shards // max(shards // devices, 1))
    ahead = [(chunks - 1) * group + 2 * (devices - 1 - r) + 1 for r in range(devices)]
    assert all(n <= most for n, most in zip(in_flight_by_device(rows), ahead, strict=True))


@fixed
@given(DEVICES, SHARDS, st.sampled_from(["1f1b", "gpipe"]))
def test_the_bound_of_stages_alike(p: int, m: int, name: str) -> None:
    rows, times = SCHEDULES[name](p, m), Times(1.0, 2.0)
    assert makespan(rows, times) == 3.0 * (m + p - 1)
    assert 1 - bubble(rows, times) == pytest.approx(m / (m + p - 1))


@fixed
@given(DEVICES, st.integers(1, 4), CHUNKS)
def test_the_bubble_of_chunks_is_a_fraction(p: int, groups: int, v: int) -> None:
    # The paper's figure, of whole groups: the bubble of 1F1B over the number of chunks.
    m = p * groups
    rows = rows_of("interleaved", p, m, v)
    assert makespan(rows, Times(1.0 / v, 2.0 / v)) == pytest.approx(3.0 * m + 3.0 * (p - 1) / v)


@fixed
@given(DEVICES, st.integers(0, 12))
def test_the_bubble_of_a_backward_in_two_parts(p: int, more: int) -> None:
    # (p - 1) (F + I - W), once the pipeline is full; with F = I = W that is (p - 1) F.
    m = 2 * p + more
    rows = SCHEDULES["zero-bubble"](p, m)
    assert makespan(rows, Times(1.0, 2.0)) == pytest.approx(3.0 * m + (p - 1))


@fixed
@given(DEVICES, SHARDS)
def test_two_parts_are_never_slower(p: int, m: int) -> None:
    times = Times(1.0, 2.0)
    assert makespan(SCHEDULES["zero-bubble"](p, m), times) <= 3.0 * (m + p - 1)


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([["f00", "b00"], ["f10"]], "of shard 0 in stage 1 there is forward"),
        ([["f00", "b00", "b00"]], "there is forward, backward, backward"),
        ([["f00", "i00"]], "there is forward, backward input"),
        ([["f00", "b00"], ["f10", "b10", "f01", "b01"]], "stage 0 is on devices 0 and 1"),
        ([["b00", "f00"]], "nobody can go on with: device 0 at the backward of shard 0"),
        (
            [["f00", "f01", "b01", "b00"], ["f10", "b10", "f11", "b11"][::-1]],
            "device 0 at the backward of shard 1 in stage 0, device 1 at the backward",
        ),
        ([["f01", "b01"]], "of shard 0 in stage 0 there is nothing"),
        ([["w00", "f00", "i00"]], "device 0 at the backward weight of shard 0"),
    ],
)
def test_what_check_refuses(rows: list[list[str]], why: str) -> None:
    works = dict(zip("fbiw", Work, strict=True))
    made = tuple(tuple(Action(works[w], int(s), int(n)) for w, s, n in row) for row in rows)
    with pytest.raises(ValueError, match=why):
        check(made)


@pytest.mark.parametrize("name", NAMES)
def test_sizes_that_cannot_be(name: str) -> None:
    for stages, shards, devices in ((0, 4, None), (2, 0, None), (3, 4, 2), (2, 4, 3)):
        with expect_error(SettingError, name="schedule"):
            SCHEDULES[name](stages, shards, devices=devices)
    if name != "interleaved":
        with expect_error(SettingError, name="schedule"):
            SCHEDULES[name](4, 4, devices=2)


@dataclass
class Stage:
    """What torch's schedules ask of a stage to make an order of: no process group."""

    stage_index: int
    num_stages: int
    group_size: int
    group_rank: int = 0
    group: None = None
    submod: torch.nn.Module = torch.nn.Identity()  # noqa: RUF009 - has no state
    stage_index_to_group_rank: dict[int, int] | None = None
    has_backward: bool = True

    @property
    def is_first(self) -> bool:
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        return self.stage_index == self.num_stages - 1


WORK_OF_TORCH = {
    "FORWARD": Work.FORWARD,
    "FULL_BACKWARD": Work.BACKWARD,
    "BACKWARD_INPUT": Work.BACKWARD_INPUT,
    "BACKWARD_WEIGHT": Work.BACKWARD_WEIGHT,
}


def rows_of_torch(kind: str, devices: int, shards: int, chunks: int) -> Rows:
    stages = [Stage(n * devices, devices * chunks, devices) for n in range(chunks)]
    made = getattr(pipelining, kind)
    schedule = made(stages[0] if kind in ("ScheduleGPipe", "Schedule1F1B") else stages, shards)
    order = getattr(schedule, "pipeline_order", None)
    if order is None:
        pytest.skip(f"torch {torch.__version__} has no order of {kind} before it runs")
    rows = []
    for rank in range(devices):
        row = [
            (
                WORK_OF_TORCH[action.computation_type.name],
                action.stage_index,
                action.microbatch_index,
            )
            for action in order[rank]
            if action is not None and action.computation_type.name in WORK_OF_TORCH
        ]
        # In the order that torch 2.13 shows of 1F1B, the last stage's forwards are of shards 1 to
        # m. (What it runs is of 0 to m - 1, in the same places.)
        first = min(shard for work, _, shard in row if work is Work.FORWARD)
        rows.append(
            tuple(
                Action(work, stage, shard - first * (work is Work.FORWARD))
                for work, stage, shard in row
            )
        )
    return tuple(rows)


def in_two_parts(rows: Rows) -> Rows:
    halves = (Work.BACKWARD_INPUT, Work.BACKWARD_WEIGHT)
    return tuple(
        tuple(
            part
            for action in row
            for part in (
                [Action(half, *action[1:]) for half in halves]
                if action.work is Work.BACKWARD
                else [action]
            )
        )
        for row in rows
    )


@pytest.mark.parametrize("devices", [1, 2, 3, 4])
def test_the_order_of_torch(devices: int) -> None:
    for shards in range(1, 5 * devices):
        ours = SCHEDULES["gpipe"](devices, shards)
        assert ours == rows_of_torch("ScheduleGPipe", devices, shards, chunks=1)
        if shards >= devices:  # torch refuses fewer
            ours = SCHEDULES["1f1b"](devices, shards)
            assert ours == rows_of_torch("Schedule1F1B", devices, shards, chunks=1)
        if shards % max(1, shards // devices):
            continue  # torch refuses groups that are not alike
        zero = in_two_parts(SCHEDULES["zero-bubble"](devices, shards))
        assert zero == rows_of_torch("ScheduleInterleavedZeroBubble", devices, shards, chunks=1)
        for chunks in (2, 3):
            ours = rows_of("interleaved", devices, shards, chunks)
            assert ours == rows_of_torch("ScheduleInterleaved1F1B", devices, shards, chunks)
