"""quorate verify: made records first, then faults that are planted in real runs."""

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from support.warm import WARM
from torch import nn
from torch.utils.data import Dataset, default_collate

from quorate.commands.main import main
from quorate.commands.options import as_typed
from quorate.commands.verify import differences, records, words
from quorate.commands.verify.differences import Difference, Sighting, alike, first_difference
from quorate.commands.verify.recorder import RecordedChannel
from quorate.commands.verify.records import (
    Call,
    EndRecord,
    Event,
    Recording,
    ShardRecord,
    TwiceRecord,
    UpdateRecord,
)
from quorate.commands.verify.twice import loaded_again, twice
from quorate.commands.verify.verdict import Run, verdict
from quorate.coordination.plan import Plan
from quorate.coordination.protocol import Compute, Done, Joined, Left
from quorate.coordination.protocol import Event as ProtocolEvent
from quorate.data.source import Source
from quorate.errors import UserError
from quorate.machine.devices import Group
from quorate.replica.computing import Computing
from quorate.replica.notes import Notes
from quorate.replica.replica import Replica
from quorate.replica.streams import Stream
from quorate.replica.turns import Turns
from quorate.replica.witness import calls
from quorate.replica.witness.calls import culprit
from quorate.replica.witness.module_trace import ModuleTrace
from quorate.replica.witness.values import tensor_text, value_hash
from quorate.training.optimizing.optimize import Optimize
from quorate.training.state import State
from quorate.transports.workers import Workers

SCRIPT = Path(__file__).parents[1] / "scripts" / "verified.py"
LIMIT_S = 100


def _loaded() -> Any:
    spec = importlib.util.spec_from_file_location("verified", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


VERIFIED = _loaded()

# --- values ---------------------------------------------------------------------------------------


def test_equal_texts_equal_bits() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    assert tensor_text(x) == tensor_text(x.t().contiguous().t())
    assert tensor_text(x) != tensor_text(x.t())
    assert tensor_text(x) != tensor_text(x + torch.tensor([0.0, 0.0, 1e-6]))
    assert tensor_text(torch.tensor(0.1)) == "float32[] 0.10000000149011612"
    assert tensor_text(x.bfloat16()).startswith("bfloat16[2, 3] ")
    assert value_hash({"x": [x, 1]}) == value_hash({"x": [x.clone(), 1]})
    assert value_hash({"x": [x, 1]}) != value_hash({"x": [x, 2]})


# --- which operator -------------------------------------------------------------------------------


def call(name: str, given: Sequence[str], made: Sequence[str], **more: Any) -> Call:
    return Call(name, tuple(given), tuple(made), **more)


def test_equal_results_blame_nobody() -> None:
    assert (
        culprit([call("rand", [], ["a"])], [call("rand", [], ["b"])], {"loss": ("1", "1")}) is None
    )


def test_a_difference_is_followed_back_to_the_call_that_made_it() -> None:
    def trace(noise: str, unused: str) -> list[Call]:
        return [
            call("relu", ["x"], ["x"]),
            call("lottery", ["x"], [f"unused{unused}"]),  # of no consequence
            call("rand", ["x"], [f"noise{noise}"], module="drop", line="a.py:3"),
            call("add", ["x", f"noise{noise}"], [f"y{noise}"], module="net"),
        ]

    found = culprit(trace("1", "1"), trace("2", "2"), {"loss": ("y1", "y2")})
    assert found is not None
    assert (found.why, found.operator, found.module) == (calls.RESULT, "rand", "drop")
    assert found.values == ("noise1", "noise2")


def test_what_no_operator_made_is_blamed_on_the_call_that_was_given_it() -> None:
    for given, why in (
        (("0.5", "0.7"), calls.NUMBER),
        (("float32[8] a", "float32[8] b"), calls.TENSOR),
    ):
        traces = [[call("mul", ["x", value], [f"y{value}"])] for value in given]
        found = culprit(*traces, {"loss": (f"y{given[0]}", f"y{given[1]}")})
        assert found is not None
        assert (found.why, found.operator, found.values) == (why, "mul", given)


def test_another_course_of_the_computation() -> None:
    first = [call("relu", ["x"], ["y"]), call("sum", ["y"], ["1"])]
    second = [call("tanh", ["x"], ["z"], line="a.py:1"), call("sum", ["z"], ["2"])]
    found = culprit(first, second, {"loss": ("1", "2")})
    assert found is not None
    assert (found.why, found.operator, found.other) == (calls.OPERATOR, "relu", "tanh")
    # What it hangs on was made by an operator before.
    first, second = ([call("rand", [], [v]), *trace] for v, trace in (("1", first), ("2", second)))
    found = culprit(first, second, {"loss": ("1", "2")})
    assert found is not None
    assert (found.why, found.operator) == (calls.RESULT, "rand")


# --- where two runs part --------------------------------------------------------------------------


def shard(step: int, number: int, **changes: Any) -> ShardRecord:
    rows = [10 * step + 2 * number, 10 * step + 2 * number + 1]
    plain = ShardRecord(
        worker=0,
        device="cpu",
        step=step,
        shard=number,
        rows=rows,
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


def recording(**changes: Any) -> Recording:
    """Two updates of two shards; with changes, of shard 1 of the second update, they differ."""
    shards = [shard(step, number) for step in (0, 1) for number in (0, 1)]
    shards[-1] = replace(shards[-1], **changes)
    tensors = [{"first.weight": f"w{n}", "last.weight": f"v{n}"} for n in range(3)]
    if changes:
        tensors[2]["last.weight"] = "other"
    return Recording(
        facts={"shards": 2, "steps_per_epoch": 2},
        updates=[UpdateRecord(n, n - 1, 0.1, tensors[n], {0: 0, 1: 0}) for n in range(3)],
        shards={(each.step, each.shard): [each] for each in shards},
        end=EndRecord(2, ""),
    )


def changed(position: int, **changes: Any) -> list[Event]:
    events = shard(1, 1).forward
    return [*events[:position], replace(events[position], **changes), *events[position + 1 :]]


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


def run(label: str, found: Recording, code: int = 0, error: str = "") -> Run:
    return Run(label, 1, found, code, error)


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
    assert said.lines[0] == "same bits on 1 worker and 2 workers, after each of 2 updates"
    assert "row 13 of the dataset has other content on 2 workers" in said.lines[-1]


def test_rows_that_are_alike() -> None:
    found = recording(samples=["row 12", "row 0"])
    assert alike(found) == [(Sighting(0, 0, 0, 0), Sighting(13, 0, 1, 1))]
    said = verdict([run("1 worker", found), run("2 workers", found)])
    assert said.is_same
    assert "on every number of workers, row 13 (worker 0) holds what row 0" in said.lines[-1]
    other = recording()
    other.shards[1, 1] = [shard(1, 1, worker=1, samples=["row 12", "row 0"])]
    said = verdict([run("1 worker", recording()), run("2 workers", other)])
    assert "on 2 workers, and not on all, row 13 (worker 1) holds what row 0" in said.lines[1]


def test_runs_that_fail() -> None:
    ended = recording()
    ended.end = EndRecord(2, "WorkerError: no worker is left")
    said = verdict([run("1 worker", recording()), run("2 workers", ended, 1, "no worker is left")])
    assert not said.is_same
    assert said.lines[:2] == [
        "2 workers failed after 2 updates, 1 worker did not:",
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


# --- one shard twice ------------------------------------------------------------------------------


def computed_twice(how: str, collate: Any = None) -> TwiceRecord:
    torch.manual_seed(2)
    model = VERIFIED.Net(how)
    state = State(
        model,
        torch.device("cpu"),
        shared=False,
        optimize=Optimize(lambda parameters: torch.optim.SGD(parameters, lr=0.1)),
    )
    source = Source(VERIFIED.Rows(how), Plan(rows=96, batch_size=24, shards=4), collate)
    source.hashes_samples = True
    replica = Replica(
        model,
        state.parameters,
        Group([torch.device("cpu")]),
        loss=VERIFIED.loss,
        turns=Turns(),
        computing=Computing(),
        notes=Notes(),
    )
    with Stream() as stream:
        trained_on = source.load((1, 2)).samples
        return twice(0, replica, source, stream, (1, 2), seed=7, trained_on=trained_on)


def test_dropout_and_batch_norm_are_repeatable() -> None:
    found = computed_twice("clean")
    assert (found.rows, found.differs, found.call) == ([], [], None)
    assert found.operators > 20


@pytest.mark.parametrize(
    ("how", "why", "operator", "module", "source"),
    [
        (
            "clock",
            calls.NUMBER,
            "aten.mul.Tensor",
            "noise",
            "return x * (1 + time.perf_counter() % 1)",
        ),
        ("state", calls.NUMBER, "aten.mul.Tensor", "noise", "return x * self.random.random()"),
        (
            "generator",
            calls.RESULT,
            "aten.rand.generator",
            "noise",
            "return x + torch.rand(x.shape,",
        ),
        ("memory", calls.MEMORY, "aten.empty.memory_format", "noise", "return x + torch.empty(8)"),
        ("seed", calls.RESULT, "aten.randn_like.generator", "noise", "return x + torch.randn_like"),
        ("part", calls.NUMBER, "aten.select.int", "noise", "mask[next(self.count)] = 0"),
        ("half", calls.MEMORY, "aten.empty_like.default", "noise", "out = torch.empty_like(x)"),
        ("hook", calls.NUMBER, "aten.mul.Tensor", "noise", "x.register_hook(lambda gradient:"),
        ("loss", calls.NUMBER, "aten.mul.Tensor", "", "return found * time.perf_counter() if"),
    ],
)
def test_the_operator_that_is_not_repeatable(
    how: str, why: str, operator: str, module: str, source: str
) -> None:
    found = computed_twice(how)
    assert found.differs
    assert found.call is not None
    assert (found.call.why, found.call.operator, found.call.module) == (why, operator, module)
    assert found.call.source.startswith(source)
    assert found.call.line.startswith("verified.py:")
    assert found.call.own_generator is (how == "generator")
    assert found.call.is_random is (how in ("generator", "seed"))
    assert found.call.in_backward is (how == "hook")


def test_rows_that_depend_on_how_often_they_are_asked_for() -> None:
    found = computed_twice("asked")
    assert len(found.rows) == 6
    assert found.differs == []  # both were computed from the rows as they came first


class Remembers(Dataset[Any]):
    """Numbers; other ones where they were given before, or the same, as a cache does."""

    def __init__(self, again: float) -> None:
        self.again, self.given = again, dict[int, torch.Tensor]()

    def __len__(self) -> int:
        return 24

    def __getitem__(self, row: int) -> torch.Tensor:
        if row in self.given:
            return self.given[row] * self.again
        self.given[row] = torch.full((3,), float(1 + row))
        return self.given[row]


@pytest.mark.parametrize("again", [2.0, 1.0])
def test_rows_that_are_others_once_they_were_given(again: float) -> None:
    dataset = Remembers(again)
    source = Source(dataset, Plan(rows=24, batch_size=8, shards=2, shuffle=False)).hashing()
    dataset[8]  # given before, as to whoever looks at some rows first
    batch = source.load((1, 0))
    found = loaded_again(3, "cpu", source, (1, 0), batch)
    if again == 1:
        assert found is None
        return
    assert found is not None
    assert (found.worker, found.step, found.shard, found.rows) == (3, 1, 0, [9, 10, 11])
    assert "rows 9, 10, 11 of the dataset had other content" in words.twice(found)[1]
    assert loaded_again(3, "cpu", source, (1, 0), source.load((1, 0))) is None  # from then on not


def test_a_batch_that_is_another_each_time_it_is_made() -> None:
    count = itertools.count()
    found = computed_twice(
        "clean", collate=lambda rows: default_collate(rows[(k := next(count)) :] + rows[:k])
    )
    assert (found.rows, found.batch_differs) == ([], True)
    assert words.twice(found)[0].startswith("batches are not repeatable")


def test_the_operator_that_two_processes_part_at() -> None:
    """A hash of a string, say: the same twice in one process, and another in the next."""
    pair = []
    for number in (0.5, 0.7):
        VERIFIED.Noise.number = number
        traced = computed_twice("process")
        assert traced.call is None
        made = recording(forward=changed(2, hash=str(number)))
        made.shards = {(0, 1): made.shards[1, 1]}
        del made.updates[2]
        made.updates[1] = replace(made.updates[1], tensors={"first.weight": str(number)}, step=0)
        made.twice = [replace(traced, step=0, shard=1)]
        pair.append(run(f"{len(pair) + 1} workers", made))
    said = verdict(pair).lines
    assert "0.5 on the one, 0.7 on the other, which no operator made" in said[2]
    assert said[3] == "    in module 'noise' (Noise)"
    assert said[4].endswith("return x * self.number")


class Lottery(torch.autograd.Function):
    """Stands for a kernel that adds in any order, as index_add does on a GPU."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.verified.lottery(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


@pytest.fixture
def lottery() -> Any:
    count = iter(range(100))
    library = torch.library.Library("verified", "DEF")
    library.define("lottery(Tensor x) -> Tensor")
    library.impl("lottery", lambda x: x * (1 + next(count)), "CPU")
    yield
    library._destroy()


@pytest.mark.usefixtures("lottery")
def test_a_kernel_that_makes_something_else_of_the_same_inputs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(VERIFIED.Noise, "forward", lambda self, x: Lottery.apply(x))
    found = computed_twice("clean")
    assert found.call is not None
    assert (found.call.why, found.call.operator) == (calls.RESULT, "verified.lottery.default")
    assert found.call.module == "noise"


def test_a_trace_of_modules_changes_nothing_and_leaves_no_hook() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 1))
    x = torch.randn(5, 3)
    model(x).sum().backward()
    plain = [tensor_text(p.grad) for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    with ModuleTrace(model) as trace:
        for _ in range(2):  # what was begun in vain is forgotten
            model.zero_grad()
            trace.watch(lambda model, batch: model(batch).sum())(model, x).backward()
    assert [tensor_text(p.grad) for p in model.parameters() if p.grad is not None] == plain
    assert [(event.what, event.path) for event in trace.forward] == [
        ("in", ""),
        *((what, path) for path in "012" for what in ("in", "out")),
        ("out", ""),
    ]
    assert {event.path for event in trace.backward} == {"", "0", "1", "2"}
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


# --- real runs ------------------------------------------------------------------------------------


class Scripted:
    """A channel whose events are given beforehand."""

    def __init__(self, events: Sequence[ProtocolEvent | None]) -> None:
        self.events = list(events)

    def send(self, effect: object) -> None:
        pass

    def receive(self, timeout_s: float | None) -> ProtocolEvent | None:
        return self.events.pop(0)


class Nothing:
    def goes_on(self) -> None:
        pass


def test_answers_are_passed_on_when_all_have_answered() -> None:
    events = [Joined(0), Done(1, 0, 1), None, Done(2, 0, 2), Left(0, "killed", crashed=False)]
    channel: Any = RecordedChannel(Scripted(events), Nothing())  # type: ignore[arg-type]
    for worker in (0, 1, 2):
        channel.send(Compute(worker, 0, worker, "home shard", (worker, 3), None))
    found = [channel.receive(1.0) for _ in range(5)]
    # The end of a worker is news at once: nobody waits for it, and it is given no other shard.
    assert found == [Joined(0), None, events[-1], Done(1, 0, 1), Done(2, 0, 2)]
    with pytest.raises(IndexError):  # nothing is left
        channel.receive(1.0)


def recorded(folder: Path, how: str, *options: str) -> Run:
    folder.mkdir()
    words = ["run", *options, "--shards", "4", "--record", str(folder), "--record-updates", "5"]
    code, out, err = WARM.run([*words, str(SCRIPT), how], dict(os.environ), LIMIT_S)
    assert "Traceback" not in err, out + err
    return Run(options[-1], int(options[-1]), records.read(folder), code, err)


TOWERS = ("--engine", "towers", "--workers")
PROCESSES = ("--engine", "processes", "--workers")


@pytest.mark.slow
def test_recording_does_not_change_a_bit(tmp_path: Path) -> None:
    found = recorded(tmp_path / "1", "clean", *TOWERS, "2").recording
    trainer = VERIFIED.trainer("clean", workers=Workers(1, engine="towers"), shards=4)
    plain = [
        {name: tensor_text(tensor) for name, tensor in trainer.model.state_dict().items()}
        for _ in trainer.updates(VERIFIED.Rows("clean"), steps=5)
    ]
    assert [update.tensors for update in found.updates[1:]] == plain
    # Each worker takes its part in each update.
    assert [update.computed_by for update in found.updates[1:]] == [{0: 0, 1: 0, 2: 1, 3: 1}] * 5
    assert len(found.twice) == 4
    assert found.end == EndRecord(5, "")


@pytest.mark.slow
def test_a_row_that_depends_on_the_worker_is_named(tmp_path: Path) -> None:
    """The workers' data is not the coordinator's, which without a recording is refused."""
    runs = [
        recorded(tmp_path / "1", "rank", *TOWERS, "1"),
        recorded(tmp_path / "2", "rank", *PROCESSES, "2"),
    ]
    found = first_difference(runs[0].recording, runs[1].recording)
    assert found is not None
    assert (found.cause, found.row) == (differences.ROW, 17)
    assert found.workers is not None
    assert {sighting.row for sighting in found.seen} == {20}
    said = verdict(runs)
    assert not said.is_same
    assert "row 17 of the dataset has other content: what row 20 has" in said.lines[1]
    assert any(
        "computed its first shards twice with the same result" in line for line in said.lines
    )


@pytest.mark.slow
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    words = ("--workers", "1", "--updates", "2", "--engine", "towers", str(SCRIPT), "clock")
    ended = subprocess.run(  # a single number is run twice
        [sys.executable, "-m", "quorate", "verify", *words],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert (ended.returncode, ended.stderr) == (1, "")
    assert "1 worker and 1 worker again part in update 1, shard 0" in ended.stdout
    assert "verified.py:" in ended.stdout
    assert list(tmp_path.glob("quorate*")) == []


@pytest.fixture
def warm_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command's runs are processes that need not import torch."""

    def child_run(
        options: Mapping[str, Any],
        script: str,
        module: str | None,
        arguments: Sequence[str],
        output: IO[bytes],
        is_done: Callable[[], bool],
    ) -> int:
        assert module is None
        line = ["run", *as_typed(options), "--", script, *arguments]
        code, out, err = WARM.run(line, dict(os.environ), LIMIT_S)
        output.write((out + err).encode())
        assert is_done()
        return code

    monkeypatch.setattr("quorate.commands.verify.runs.child_run", child_run)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_runs")
def test_what_the_command_says(capfd: pytest.CaptureFixture[str]) -> None:
    options = (str(SCRIPT), "--engine", "towers", "--updates", "4")
    assert main(["verify", *options, "--", "clean"]) == 0
    said = capfd.readouterr().out
    assert said.startswith("3 workers: 4 updates of 3 shards\n2 workers: 4 updates of 3 shards\n")
    assert (
        "same bits on 1 worker, 2 workers, 3 workers, 3 workers stopped after update 2 and "
        "2 workers resumed after update 2, after each of 4 updates"
    ) in said
    assert "one shard computed twice on cpu: same bits" in said
    assert main(["verify", *options, "--workers", "1,2", "generator"]) == 1
    said = capfd.readouterr().out
    assert "module 'noise' (Noise) was given the same, and returned something else" in said
    assert "aten.rand.generator drew from a generator that the script made" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("missing.py",), "script: got 'missing.py'"),
        ((str(SCRIPT), "--workers", "two"), "workers: got 'two'"),
        ((str(SCRIPT), "--updates", "0"), "updates: got 0"),
        ((str(SCRIPT), "--compile", "--updates", "0"), "updates: got 0"),
    ],
)
def test_mistakes(words: Sequence[str], said: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *words]) == 2
    assert said in capfd.readouterr().err


@pytest.mark.slow
def test_a_rule_that_depends_on_timing_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "records"
    folder.mkdir()
    words = ["run", "--engine", "towers", "--workers", "2", "--update", "async"]
    code, _, err = WARM.run(
        [*words, "--record", str(folder), str(SCRIPT), "clean"], dict(os.environ), LIMIT_S
    )
    assert code == 2
    assert "verify the script with --update sync" in err
