"""The first difference of recorded runs, the cause, and the verdict: over made records."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.messages import expect_message

from quorate.commands.verify import differences, records
from quorate.commands.verify.differences import first_difference
from quorate.commands.verify.records import (
    EndRecord,
    Event,
    Recording,
    ShardRecord,
    StepRecord,
    TwiceRecord,
)
from quorate.commands.verify.verdict import Run, Way, verdict
from quorate.errors import UserError
from quorate.replica.witness.calls import CallRecord


def shard(step: int, number: int, **changes: Any) -> ShardRecord:
    rows = [10 * step + 2 * number, 10 * step + 2 * number + 1]
    plain = ShardRecord(
        *(0, "cpu", step, number, rows),
        samples=[f"row {row}" for row in rows],
        batch=f"batch {step} {number}",
        forward=[
            Event("in", "", "Net", 0, "x"),
            Event("in", "first", "Linear", 0, "x"),
            Event("out", "first", "Linear", 0, "y"),
            Event("in", "last", "Linear", 0, "relu y"),
            Event("out", "last", "Linear", 0, "z"),
            Event("out", "", "Net", 0, "z"),
        ],
        backward=[Event("grad", "", "Net", 0, "dz"), Event("grad", "first", "Linear", 0, "dy")],
        metrics={"loss": 0.5, "weight": 2.0},
        gradient={"first.weight": "g1", "last.weight": "g2"},
        buffers="b",
    )
    return replace(plain, **changes)


def changed(position: int, **changes: Any) -> list[Event]:
    events = shard(1, 1).forward
    return [*events[:position], replace(events[position], **changes), *events[position + 1 :]]


def recording(**changes: Any) -> Recording:
    """Two updates of two shards; with changes, of shard 1 of the second update, they differ."""
    shards = [shard(step, number) for step in (0, 1) for number in (0, 1)]
    shards[-1] = replace(shards[-1], **changes)
    tensors = [{"first.weight": f"w{n}", "last.weight": f"v{n}"} for n in range(3)]
    if changes:
        tensors[2]["last.weight"] = "other"
    return Recording(
        facts={"shards": 2, "steps_per_epoch": 2},
        updates=[StepRecord(n, n - 1, [0.3, 0.1], tensors[n], {0: 0, 1: 0}) for n in range(3)],
        shards={(each.step, each.shard): [each] for each in shards},
        end=EndRecord(2, ""),
    )


def with_update(number: int, weight: str = "", **changes: Any) -> Recording:
    """Return the recording with another update."""
    found = recording()
    if weight:
        changes["tensors"] = found.updates[number].tensors | {weight: "o"}
    found.updates[number] = replace(found.updates[number], **changes)
    return found


def with_copies(*copies: ShardRecord, **update: Any) -> Recording:
    """Return the recording with other copies of shard 1 of the second update."""
    found = with_update(2, **update)
    found.shards[1, 1] = [*copies]
    return found


def run(label: str, found: Recording, code: int = 0, error: str = "") -> Run:
    return Run(label, 1, found, code, error)


def two(other: Recording, first: Recording | None = None) -> list[Run]:
    return [run("1 worker", first or recording()), run("2 workers", other)]


def weights(*found: str, doubts: Sequence[str] = ()) -> Recording:
    updates = [StepRecord(n, n - 1, [0.1], {"last.weight": w}) for n, w in enumerate(found)]
    end = EndRecord(len(found) - 1, "", list(doubts))
    return Recording(facts={"shards": 2, "steps_per_epoch": 2}, updates=updates, end=end)


def stopped(found: str) -> Run:
    return Run("3 towers", 1, weights(*found), 0, "", Way.TOWERS, is_part=True)


def resumed(found: str) -> Run:
    moved = weights(*found).moved(2)
    return Run("2 workers resumed", 1, moved, 0, "", Way.RESUMED, first=2, is_part=True)


def killed(found: str) -> Run:
    return Run("3 workers with one killed", 1, weights(*found), 0, "", Way.KILLED, first=2)


def sourced(*runs: Run) -> list[Run]:
    """Return runs, each with a different model.py."""
    for number, each in enumerate(runs):
        each.recording.facts["sources"] = {"train.py": 1, "model.py": number}
    return [*runs]


PLAIN = run("1 worker", weights(*"abcde"))
OTHER = run("2 workers", weights(*"abopq"))
LATER = {"gradient": {"first.weight": "g1", "last.weight": "o"}, "worker": 1, "buffers": "o"}
OTHER_GRADIENT = {"first.weight": "o", "last.weight": "g"}
STAGED = TwiceRecord(0, "cpu+cpu", 0, 0, [], 0, ["x"], None, in_stages=2)
NUMBER = CallRecord("number", "aten.mul.Tensor", *5 * ("",), ("1", "2"), False, False, False)
TWICE = TwiceRecord(0, "cpu", 0, 0, [], 9, ["loss"], NUMBER)
ALIKE = {"samples": ["row 12", "row 0"]}

# Shard 1 of the second update in another run, with the later consequences of a cause there.
CAUSES: dict[str, dict[str, Any]] = {
    differences.ROWS: {"rows": [1, 2]},
    differences.ROW: ALIKE,
    differences.BATCH: {"batch": "other"},
    differences.MODULE: {"forward": changed(2, hash="o")},
    differences.BETWEEN: {"forward": changed(3, hash="o")},
    differences.CALLS: {"forward": changed(3, path="other")},
    differences.LOSS: {"metrics": {"loss": 0.6, "weight": 2.0}},
    differences.BACKWARD: {
        "backward": [shard(1, 1).backward[0], Event("grad", "first", "Linear", 0, "o")]
    },
    differences.GRADIENT: {},
}
RUNS: dict[str, Callable[[], list[Run]]] = {
    differences.BUFFERS: lambda: two(recording(worker=1, buffers="o")),
    differences.WEIGHTS: lambda: two(with_update(0, "last.weight")),
    differences.UPDATE: lambda: two(with_update(1, "first.weight")),
    differences.STAGES: lambda: two(
        with_update(1, "first.weight"), replace(recording(), twice=[STAGED])
    ),
    differences.RATE: lambda: two(with_update(0, lrs=[0.3, 0.2])),
    differences.LENGTH: lambda: two(replace(recording(), updates=recording().updates[:2])),
    "two copies, one the same": lambda: two(
        with_copies(
            shard(1, 1, gradient={"first.weight": "o", "last.weight": "o"}),
            shard(1, 1),
            weight="first.weight",
        )
    ),
    "two copies of a killed worker, one of which counted": lambda: two(
        with_copies(
            shard(1, 1, worker=1),
            shard(1, 1, worker=1, gradient=OTHER_GRADIENT),
            weight="first.weight",
            computed_by={1: 1},
        )
    ),
    "rows that are alike": lambda: two(recording(**ALIKE), recording(**ALIKE)),
    "one fails": lambda: [
        run("1 worker", recording()),
        run(
            "2 workers",
            replace(recording(), end=EndRecord(2, "WorkerError: no worker is left")),
            1,
            "no worker is left",
        ),
    ],
    "no training loop": lambda: [run("2 workers", Recording(), 0, "hello")],
    "the script is changed": lambda: sourced(*two(recording(buffers="o"))),
    "stopped and resumed": lambda: [PLAIN, stopped("abc"), resumed("cde")],
    "resumed otherwise": lambda: [PLAIN, stopped("abc"), resumed("opq")],
    "another after a kill": lambda: [PLAIN, killed("abopq")],
    "doubts with equal digests": lambda: [
        PLAIN,
        *(run(f"{n} workers", weights(*"abcde", doubts=["the clock"])) for n in (2, 3)),
    ],
    "the cause before what follows from it": lambda: [
        PLAIN,
        run("2 workers", replace(weights(*"abopq", doubts=["the clock"]), twice=[TWICE])),
    ],
    "another under one hash seed": lambda: [PLAIN, OTHER, OTHER._replace(way=Way.HASHED)],
}


def said(runs: list[Run]) -> str:
    """Return a verdict as text."""
    try:
        if len(runs) == 1:
            runs[0].refuse_a_mistake()
        found = verdict(runs)
    except UserError as error:
        return f"mistake: {error}"
    assert found.is_same == (not found.lines[0].startswith("same bits: no"))
    return "\n".join(found.lines)


@pytest.mark.parametrize("cause", CAUSES)
def test_the_cause_of_a_difference_in_a_shard(cause: str) -> None:
    other = recording(**{**LATER, **CAUSES[cause]})
    found = first_difference(recording(), other)
    assert found is not None
    assert (found.cause, found.update, found.shard, found.workers) == (cause, 2, 1, (0, 1))
    expect_message(said(two(other)))


@pytest.mark.parametrize("name", RUNS)
def test_the_verdict_over_runs(name: str) -> None:
    expect_message(said(RUNS[name]()))


# --- files ----------------------------------------------------------------------------------------


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    made = recording()
    made.twice = [TwiceRecord(0, "cpu", 0, 0, [3], 1, ["loss"], NUMBER)]
    records.note(tmp_path, records.COORDINATOR, made.facts)
    for update in made.updates:
        records.note(tmp_path, records.COORDINATOR, update)
    for each in (*made.twice, *(one for copies in made.shards.values() for one in copies)):
        records.note(tmp_path, "quorate-worker-0", each)
    with (tmp_path / "quorate-worker-0.jsonl").open("a") as file:
        file.write('{"kind": "ShardRecord", "wor')  # the writer was killed
    assert not records.has_ended(tmp_path)
    records.note(tmp_path, records.COORDINATOR, made.end)
    assert records.has_ended(tmp_path)
    assert records.read(tmp_path) == made
