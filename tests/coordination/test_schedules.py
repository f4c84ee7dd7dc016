"""Schedules of a pipeline: the constraints on each, closed forms, and the recorded orders."""

import hashlib
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import fixed
from support.messages import expect_error

from quorate.commands.bench.schedule_times import (
    ActionTimes,
    bubble,
    in_flight,
    makespan,
    most_held,
    placement,
    timeline,
)
from quorate.coordination.pipeline_schedules import SCHEDULES, Action, Rows, Work
from quorate.errors import SettingError

NAMES = sorted(SCHEDULES)
DEVICES = st.integers(1, 6)
SHARDS = st.integers(1, 20)
CHUNKS = st.integers(1, 4)


def rows_of(name: str, devices: int, shards: int, chunks: int) -> Rows:
    stages = devices * (chunks if name == "interleaved" else 1)
    return SCHEDULES[name](stages, shards, devices=devices)


@fixed(60)
@given(st.sampled_from(NAMES), DEVICES, SHARDS, CHUNKS)
def test_everything_once_and_nobody_waits_forever(
    name: str, devices: int, shards: int, chunks: int
) -> None:
    rows = rows_of(name, devices, shards, chunks)
    assert len(timeline(rows, ActionTimes())) == sum(map(len, rows))
    stages = devices * (chunks if name == "interleaved" else 1)
    assert placement(rows) == tuple(stage % devices for stage in range(stages))
    works: dict[tuple[int, int], list[str]] = {}
    for device, row in enumerate(rows):
        assert all(action.stage % devices == device for action in row)
        for work, stage, shard in row:
            works.setdefault((stage, shard), []).append(work.value)
    assert works.keys() == set(itertools.product(range(stages), range(shards)))
    halves = ["forward", "backward input", "backward weight"]
    assert all(done in (["forward", "backward"], halves) for done in works.values())


@fixed(60)
@given(DEVICES, SHARDS, CHUNKS)
def test_what_is_held(devices: int, shards: int, chunks: int) -> None:
    first = [min(devices - stage, shards) for stage in range(devices)]
    assert list(in_flight(SCHEDULES["1f1b"](devices, shards))) == first
    assert set(in_flight(SCHEDULES["gpipe"](devices, shards))) == {shards}
    # Nowhere more than at the first stage of 1F1B.
    assert max(in_flight(SCHEDULES["zero-bubble"](devices, shards))) <= min(devices, shards)
    group = -(-shards // max(shards // devices, 1))
    ahead = [(chunks - 1) * group + 2 * (devices - 1 - r) + 1 for r in range(devices)]
    held = tuple(map(most_held, rows_of("interleaved", devices, shards, chunks)))
    assert all(n <= most for n, most in zip(held, ahead, strict=True))


@fixed(60)
@given(DEVICES, SHARDS, st.integers(1, 4), CHUNKS)
def test_closed_forms_of_the_bubble(p: int, m: int, groups: int, chunks: int) -> None:
    """Stages alike: F = 1, B = 2. In two parts (p - 1) (F + I - W), once the pipeline is full."""
    times = ActionTimes(1.0, 2.0)
    for name in ("1f1b", "gpipe"):
        rows = SCHEDULES[name](p, m)
        assert makespan(rows, times) == 3.0 * (m + p - 1)
        assert 1 - bubble(rows, times) == pytest.approx(m / (m + p - 1))
    in_parts = makespan(SCHEDULES["zero-bubble"](p, m), times)
    assert in_parts <= 3.0 * (m + p - 1)
    assert m < 2 * p or in_parts == pytest.approx(3.0 * m + (p - 1))
    # The paper's figure, of whole groups: the bubble of 1F1B over the number of chunks.
    rows, whole = rows_of("interleaved", p, p * groups, chunks), 3.0 * p * groups
    found = makespan(rows, ActionTimes(1.0 / chunks, 2.0 / chunks))
    assert found == pytest.approx(whole + 3.0 * (p - 1) / chunks)


def test_a_transfer_between_devices_takes_its_time_and_within_one_none() -> None:
    """Forward of 1 s and backward of 2 s on each of two stages; 0.5 s there, and back."""
    times = ActionTimes((1.0, 1.0), (2.0, 2.0), 0.5)
    assert makespan(SCHEDULES["gpipe"](2, 1), times) == 7.0
    spans = timeline(SCHEDULES["interleaved"](2, 1, devices=1), times)
    assert sorted((span.begin, span.end) for span in spans) == [(0, 1), (1, 2), (2, 4), (4, 6)]


def test_devices_that_wait_for_each_other_are_named() -> None:
    works = dict(zip("fbiw", Work, strict=True))
    rows = [["f00", "f01", "b01", "b00"], ["f10", "b10", "f11", "b11"][::-1]]
    made = tuple(tuple(Action(works[w], int(s), int(n)) for w, s, n in row) for row in rows)
    why = "device 0 at the backward of shard 1 in stage 0, device 1 at the backward"
    with pytest.raises(ValueError, match=why):
        timeline(made, ActionTimes())


@pytest.mark.parametrize("name", NAMES)
def test_sizes_that_cannot_be(name: str) -> None:
    for stages, shards, devices in ((0, 4, None), (2, 0, None), (3, 4, 2), (2, 4, 3)):
        with expect_error(SettingError, name="schedule"):
            SCHEDULES[name](stages, shards, devices=devices)
    if name != "interleaved":
        with expect_error(SettingError, name="schedule"):
            SCHEDULES[name](4, 4, devices=2)


# 1 to 4 devices and 1 to 19 shards; recorded when torch 2.13's schedules had the same orders.
ORDERS = {
    "1f1b": "1310d56739e9832a",
    "gpipe": "dbadbcd4a737250f",
    "interleaved": "cd6db9461d6d1eba",
    "zero-bubble": "de1466756fbd2e67",
}


@pytest.mark.parametrize("name", NAMES)
def test_the_order_is_as_before(name: str) -> None:
    orders = hashlib.sha256()
    for devices, shards, chunks in itertools.product(range(1, 5), range(1, 20), (2, 3)):
        if name == "interleaved" or chunks == 2:
            for row in rows_of(name, devices, shards, chunks):
                orders.update(f"{[(a.work.name, a.stage, a.shard) for a in row]}\n".encode())
    found = orders.hexdigest()[:16]
    assert found == ORDERS[name], found
