"""What ``quorate bench`` says of stages: how busy they are, what their schedule leaves idle."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support.warm import WARM

from quorate.commands.bench.measured import Measured
from quorate.commands.bench.stages import StageSpans, StageTime, lines
from quorate.coordination.spans import Span
from quorate.transports.tracing.batch import batch

SCRIPT = Path(__file__).parents[1] / "scripts" / "measured.py"


def test_spans_are_added_up_by_worker_and_stage() -> None:
    sums = StageSpans()

    def spans(step: int) -> list[Span]:
        rows = [("forward", 0, 0.0, 1.0), ("forward", 1, 1.0, 1.5), ("backward", 1, 1.5, 3.5)]
        of_stages = [
            Span(name, "training", step, shard, begin, end, f"stage {stage}")
            for name, stage, begin, end in rows
            for shard in range(2)
        ]
        halves = [("backward input", 3.5, 4.0), ("backward weight", 4.0, 4.5)]
        of_stages += [
            Span(name, "training", step, 0, begin, end, "stage 1") for name, begin, end in halves
        ]
        return [*of_stages, Span("forward", "training", step, 0, 0.0, 9.0)]  # the worker's own

    sums.put(0, spans(4))
    sums.begin(5)
    sums.put(0, spans(4))  # late: of before
    sums.put(0, spans(5))
    sums.put(0, spans(6))
    sums.take_batch(1, json.loads(json.dumps(batch(spans(6)))))
    assert sums.times() == [
        StageTime(0, 0, steps=2, shards=4, forward_s=4.0, backward_s=0.0),
        StageTime(0, 1, steps=2, shards=4, forward_s=2.0, backward_s=10.0),
        StageTime(1, 0, steps=1, shards=2, forward_s=2.0, backward_s=0.0),
        StageTime(1, 1, steps=1, shards=2, forward_s=1.0, backward_s=5.0),
    ]
    assert sums.spans == []


def test_stages_that_take_the_same_time() -> None:
    # 10 steps of 8 shards, of 1 + 2 s in each stage: 27 s is the least for a step, of 30.
    stages = [StageTime(0, number, 10, 80, 80.0, 160.0) for number in range(2)]
    assert [*lines(stages, "1f1b", devices=2, step_s=30.0)] == [
        "stages: busy 0 80%, 1 80% of a step",
        "1f1b, 8 shards: idle 11% if stages took the same time, 11% with theirs, which is 27 s of "
        "a step's 30 s; activations of 2 + 1 shards",
        "less would be idle with zero-bubble 4%",
    ]


def test_several_stages_on_a_device_and_several_workers() -> None:
    stages = [
        StageTime(worker, number, 10, 40, 20.0 * (1 + worker), 40.0 * (1 + worker))
        for worker in range(2)
        for number in range(4)
    ]
    busy, idle, *_ = lines(stages, "interleaved", devices=2, step_s=36.0)
    # A shard takes a stage 1.5 s on the one worker and 3 s on the other; four of them, 9 s.
    assert busy == "stages: busy 0 25%, 1 25%, 2 25%, 3 25% of a step; devices 50%, 50%"
    assert idle.startswith("interleaved, 4 shards: idle 11% if stages took the same time, 11% with")


def test_nothing_is_said_of_what_was_not_measured() -> None:
    assert [*lines([], "1f1b", devices=2, step_s=1.0)] == []
    later = StageTime(0, 1, 3, 6, 1.0, 1.0)
    assert [*lines([later], "1f1b", devices=2, step_s=1.0)] == []


@pytest.mark.slow
def test_a_bench_of_one_device_and_of_stages(tmp_path: Path) -> None:
    words = ["--devices", "cpu", "--devices", "cpu+cpu", "--engine", "processes"]
    words += ["--repeats", "1", "--seconds", "0.3", "--out", str(tmp_path)]
    code, shown, error = WARM.run(["bench", str(SCRIPT), *words], os.environ, 240)
    assert (code, error) == (0, "")
    assert "stages: busy 0 " in shown
    assert "1f1b, 4 shards: idle 20% if stages took the same time, " in shown
    assert "same bits: all 2 runs have this digest after " in shown
    (whole, staged) = json.loads((tmp_path / "results.json").read_text())["contenders"]
    assert staged["efficiency"] == pytest.approx(staged["speed_up"] / 2)
    (run,) = [Measured.from_json({**each, "digests": {}}) for each in _runs(staged)]
    assert [stage.stage for stage in run.stages] == [0, 1]
    for stage in run.stages:
        # All shards of a step are dealt at once, so that they flow.
        assert stage.shards == 4 * stage.steps
        assert 0 < stage.forward_s + stage.backward_s < run.seconds
    assert whole["runs"][0]["stages"] == []


def _runs(contender: dict[str, list[dict[str, object]]]) -> list[dict[str, object]]:
    """Return the runs of a contender, without what is not measured but made of it."""
    return [
        {name: value for name, value in run.items() if name != "examples_per_s"}
        for run in contender["runs"]
    ]
