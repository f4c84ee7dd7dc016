"""One shard twice: which operator, which rows, which process makes something else."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.recorded_runs import VERIFIED, call, changed, recording, run
from torch import nn
from torch.utils.data import Dataset, default_collate

from quorate.commands.verify import words
from quorate.commands.verify.records import (
    Call,
    TwiceRecord,
)
from quorate.commands.verify.twice import loaded_again, twice
from quorate.commands.verify.verdict import verdict
from quorate.coordination.plan import Plan
from quorate.data.source import Source
from quorate.machine.devices import Group
from quorate.replica.computing import Computing
from quorate.replica.notes import Notes
from quorate.replica.replica import Replica
from quorate.replica.streams import Stream
from quorate.replica.turns import Turns
from quorate.replica.witness import calls
from quorate.replica.witness.calls import culprit
from quorate.replica.witness.module_trace import ModuleTrace
from quorate.replica.witness.values import tensor_text
from quorate.training.optimizing.optimize import Optimize
from quorate.training.state import State


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


def test_the_first_call_that_was_given_it_is_blamed_though_its_own_result_is_rounded() -> None:
    def trace(value: str) -> list[Call]:
        return [
            call("add", ["x", "0.5"], ["y"], line="a.py:1"),
            call("mul", ["y", value], ["z"], line="a.py:2"),
            call("mul", ["grad", value], [f"back{value}"], line="a.py:9"),
            call("sum", [f"back{value}", value], [f"sum{value}"], line="a.py:10"),
        ]

    found = culprit(trace("0.7"), trace("0.8"), {"weight": ("sum0.7", "sum0.8")})
    assert found is not None
    assert (found.why, found.line, found.values) == (calls.NUMBER, "a.py:2", ("0.7", "0.8"))


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
        (
            "loss",
            calls.NUMBER,
            "aten.mul.Tensor",
            "",
            "return found * (1 + time.perf_counter() % 1) if",
        ),
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
    assert "0.5 on the one, 0.7 on the other, which no operator computed" in said[1]
    assert said[2] == "    in module 'noise' (Noise)"
    assert said[3].endswith("return x * self.number")


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
