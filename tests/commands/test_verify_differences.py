"""Where two recorded runs part, and what that says of the cause."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.recorded_runs import call, changed, recording, run, shard

from quorate.commands.verify import differences, records
from quorate.commands.verify.differences import Difference, Sighting, alike, first_difference
from quorate.commands.verify.records import (
    EndRecord,
    Event,
    Recording,
    TwiceRecord,
)
from quorate.commands.verify.verdict import verdict
from quorate.errors import UserError
from quorate.replica.witness.calls import culprit

CAUSES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    differences.ROWS: ({"rows": [1, 2]}, {}),
    differences.ROW: ({"samples": ["row 12", "row 0"]}, {"row": 13}),
    differences.BATCH: ({"batch": "other"}, {}),
    differences.MODULE: ({"forward": changed(2, hash="o")}, {"module": "first", "kind": "Linear"}),
    differences.BETWEEN: ({"forward": changed(3, hash="o")}, {"module": "last", "after": "first"}),
    differences.CALLS: (
        {"forward": changed(3, path="other")},
        {"module": "other", "after": "first"},
    ),
    differences.LOSS: ({"metrics": {"loss": 0.6, "weight": 2.0}}, {"metric": "loss"}),
    differences.BACKWARD: (
        {"backward": [shard(1, 1).backward[0], Event("grad", "first", "Linear", 0, "o")]},
        {"module": "first"},
    ),
    differences.GRADIENT: ({"gradient": {"first.weight": "g1", "last.weight": "o"}}, {}),
    differences.BUFFERS: ({"buffers": "o"}, {}),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_the_cause_of_a_difference(cause: str) -> None:
    changes, expected = CAUSES[cause]
    # What a cause brings about later in a shard is not taken for it.
    later = {"gradient": {"first.weight": "g1", "last.weight": "o"}, "worker": 1, "buffers": "o"}
    if cause == differences.BUFFERS:
        later = {"worker": 1}
    found = first_difference(recording(), recording(**{**later, **changes}))
    assert found is not None
    assert (found.cause, found.update, found.shard, found.workers) == (cause, 2, 1, (0, 1))
    assert {name: getattr(found, name) for name in expected} == expected
    if cause == differences.ROW:
        assert found.seen[0] == Sighting(0, 0, 0, 0)
    if cause != differences.BUFFERS:
        assert (found.parameter, found.parameters) == ("last.weight", 1)
    said = verdict(
        [run("1 worker", recording()), run("2 workers", recording(**{**later, **changes}))]
    )
    assert not said.is_same
    assert "1 worker and 2 workers part in update 2, shard 1" in said.lines[0]
    for name in ("module", "row", "metric"):
        assert str(expected.get(name, "")) in said.lines[1]


def test_weights_updates_and_lengths() -> None:
    other = recording()
    assert first_difference(recording(), other) is None
    other.updates[0].tensors["last.weight"] = "o"
    assert first_difference(recording(), other) == Difference(
        differences.WEIGHTS, 0, parameter="last.weight", parameters=1
    )
    other = recording()
    other.updates[1].tensors["first.weight"] = "o"
    assert first_difference(recording(), other) == Difference(
        differences.UPDATE, 1, parameter="first.weight", parameters=1
    )
    staged = TwiceRecord(0, "cpu+cpu", other.updates[1].step, 0, [], 0, ["x"], None, in_stages=2)
    found = first_difference(replace(recording(), twice=[staged]), other)
    assert found is not None
    assert (found.cause, found.parameter) == (differences.STAGES, "first.weight")
    other = recording()
    other.updates[0] = replace(other.updates[0], lr=0.2)
    assert first_difference(recording(), other) == Difference(differences.RATE, 0, rates=(0.1, 0.2))
    said = verdict([run("1 worker", recording()), run("2 workers", other)]).lines
    assert "the learning rate of the next update is 0.1 on the one, 0.2 on the other" in said[1]
    other = recording()
    del other.updates[2]
    assert first_difference(recording(), other) == Difference(differences.LENGTH, 2)


def test_a_shard_that_was_computed_by_two_workers_is_the_same_if_one_copy_is() -> None:
    other = recording(gradient={"first.weight": "o", "last.weight": "o"})
    other.shards[1, 1].append(shard(1, 1))
    found = first_difference(recording(), other)
    assert found is not None
    assert found.cause == differences.UPDATE


def test_what_a_killed_worker_noted_and_never_answered_does_not_count() -> None:
    other = recording()
    # It computed the shard, noted it, and was killed; the one in its place parted.
    other.shards[1, 1] = [
        shard(1, 1, worker=1),
        shard(1, 1, worker=1, gradient={"first.weight": "o", "last.weight": "g"}),
    ]
    other.updates[2] = replace(other.updates[2], tensors={"first.weight": "o"})
    found = first_difference(recording(), other)
    assert found is not None
    assert found.cause == differences.UPDATE  # who made the update is not known
    other.updates[2] = replace(other.updates[2], computed_by={1: 1})
    found = first_difference(recording(), other)
    assert found is not None
    assert (found.cause, found.parameter) == (differences.GRADIENT, "first.weight")


def test_what_changes_nothing_is_a_note() -> None:
    other = recording()
    other.shards[1, 1] = [shard(1, 1, samples=["row 12", "time 5"])]
    said = verdict([run("1 worker", recording()), run("2 workers", other)])
    assert said.is_same
    assert (
        said.lines[0] == "same bits on 1 worker and 2 workers, after each of 2 updates of 2 shards"
    )
    assert "row 13 of the dataset has other content on 2 workers" in said.lines[-1]


def test_rows_that_are_alike() -> None:
    found = recording(samples=["row 12", "row 0"])
    assert alike(found) == [(Sighting(0, 0, 0, 0), Sighting(13, 0, 1, 1))]
    said = verdict([run("1 worker", found), run("2 workers", found)])
    assert said.is_same
    assert "row 13 (worker 0) has the content of row 0" in said.lines[-1]
    other = recording()
    other.shards[1, 1] = [shard(1, 1, worker=1, samples=["row 12", "row 0"])]
    said = verdict([run("1 worker", recording()), run("2 workers", other)])
    assert "on 2 workers, and not on all, row 13 (worker 1) has the content" in said.lines[1]


def test_runs_that_fail() -> None:
    ended = recording()
    ended.end = EndRecord(2, "WorkerError: no worker is left")
    said = verdict([run("1 worker", recording()), run("2 workers", ended, 1, "no worker is left")])
    assert not said.is_same
    assert said.lines[:2] == [
        "same bits: no: 2 workers failed after 2 updates, 1 worker did not:",
        "  no worker is left",
    ]
    mistaken = run("2 workers", Recording(), 2, "loss: got 5")
    for runs in ([mistaken, mistaken], [run("1 worker", recording()), mistaken]):
        with pytest.raises(UserError, match="the run on 2 workers failed: loss: got 5"):
            verdict(runs)


def test_a_script_that_ends_without_training() -> None:
    with pytest.raises(UserError, match="the script ended without a training loop"):
        run("2 workers", Recording(), 0, "hello").refuse_a_mistake()
    failed = [run(f"{n} workers", Recording(), 3, "so long") for n in (1, 2)]
    with pytest.raises(UserError, match="the run on 1 workers failed: exit code 3; so long"):
        verdict(failed)


def test_a_script_that_was_changed_between_two_runs() -> None:
    runs = [run("1 worker", recording()), run("2 workers", recording(buffers="o"))]
    for number, each in enumerate(runs):
        each.recording.facts["sources"] = {"train.py": 1, "model.py": number}
    with pytest.raises(UserError, match=r"model\.py was changed between two runs"):
        verdict(runs)


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    made = recording()
    blamed = culprit([call("mul", ["1"], ["x"])], [call("mul", ["2"], ["y"])], {"loss": ("x", "y")})
    made.twice = [TwiceRecord(0, "cpu", 0, 0, [3], 1, ["loss"], blamed)]
    records.note(tmp_path, records.COORDINATOR, made.facts)
    for update in made.updates:
        records.note(tmp_path, records.COORDINATOR, update)
    for each in (*made.twice, *(one for copies in made.shards.values() for one in copies)):
        records.note(tmp_path, "quorate-worker-0", each)
    with (tmp_path / "quorate-worker-0.jsonl").open("a") as file:
        file.write('{"kind": "ShardRecord", "wor')  # its writer was killed
    assert not records.has_ended(tmp_path)
    assert made.end is not None
    records.note(tmp_path, records.COORDINATOR, made.end)
    assert records.has_ended(tmp_path)
    assert records.read(tmp_path) == made
