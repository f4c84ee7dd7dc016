"""Whether a worker is the same as the coordinator: what is compared, and what is said."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from support.messages import expect_error
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from quorate.coordination.course import Course
from quorate.coordination.plan import Plan
from quorate.data import at as place_of_rows
from quorate.data.feed import Source
from quorate.errors import UserError
from quorate.machine.devices import Group
from quorate.machine.shared_memory import Segment
from quorate.replica.buffers import Buffers
from quorate.replica.fingerprint import fingerprint
from quorate.replica.flat import Layout
from quorate.transports.job import Evaluation, Training
from quorate.transports.processes import agreement as agreements
from quorate.transports.processes.agreement import Agreement
from quorate.transports.remote_error import to_json

ROWS = TensorDataset(torch.arange(8.0)[:, None])


class Drawn(Dataset[torch.Tensor]):
    """Gives another value each time, whatever generators are seeded with."""

    def __init__(self) -> None:
        self._counter = itertools.count()

    def __len__(self) -> int:
        return 8

    def __getitem__(self, row: int) -> torch.Tensor:
        return torch.tensor([float(next(self._counter))])


class Broken(Drawn):
    def __getitem__(self, row: int) -> torch.Tensor:
        raise ValueError("a row that is no row")


class Kept:
    """Stands for an arena that keeps parameters; and for user code that changes the model."""

    changes = 0

    def kept(self, _buffers: Buffers) -> Segment:
        return Segment(64)


def job(dataset: Any = ROWS, kind: type[Training | Evaluation] = Training) -> Any:
    model = nn.Linear(1, 1)
    flat = Layout(model.named_parameters()).new(torch.device("cpu"))
    plan = Plan(rows=8, batch_size=4, shards=2, shuffle=False)
    return kind(Source(dataset, plan), flat, range(4))


def agreement(
    monkeypatch: pytest.MonkeyPatch, dataset: Any = ROWS, gradients: str = "aa", cpus: int = 2
) -> tuple[Agreement, list[str]]:
    """An agreement whose gradients have fingerprints that are given; and what it says."""
    prints = iter(gradients)
    monkeypatch.setattr(agreements, "probe_fingerprint", lambda *_: next(prints))
    said: list[str] = []
    groups = [Group([torch.device("cpu")])] * cpus

    class Probe:
        group, device = groups[0], torch.device("cpu")

    model: Any = nn.Linear(1, 1)
    probe: Any = Probe
    datasets = {"dataset": dataset, "validation": None}
    arena: Any = Kept()
    made = Agreement(
        *(model, arena, Buffers(model), probe, groups, datasets),
        threads=1,
        say=said.append,
        changes=lambda: arena.changes,
    )
    return made, said


def data_print(work: Any) -> str:
    return fingerprint(work.source.load((0, 0)).data)


def checks(agreed: Agreement, work: Any, known: set[str]) -> list[str]:
    asked, fds = agreed.checks(work, known)
    assert len(fds) == ("gradient" in asked)
    return asked


def test_one_that_is_the_same_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    agreed, said = agreement(monkeypatch)
    work, known = job(), set[str]()
    agreed.expect(work, is_first=True)
    assert checks(agreed, work, known) == ["data", "gradient"]
    assert agreed.check(work, known, {"data": data_print(work), "gradient": "a"}, 0)
    assert checks(agreed, work, known) == []
    # Another process, however late it comes.
    assert checks(agreed, work, set()) == ["data", "gradient"]
    assert said == []


def test_one_whose_model_is_changed_while_it_computes_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agreed, said = agreement(monkeypatch, gradients="aabbccddee")
    work, known, user = job(), set[str](), agreed._arena
    agreed.expect(work, is_first=True)
    assert checks(agreed, work, known) == ["data", "gradient"]
    user.changes += 1
    assert not agreed.check(work, known, {"gradient": "x"}, 1)
    # The coordinator has computed its own once more: which is that of now.
    assert "gradient" in checks(agreed, work, known)
    with expect_error(UserError):
        agreed.check(work, set(known), {"gradient": "a"}, 1)
    assert agreed.check(work, set(known), {"gradient": "b"}, 1)
    for tries in (2, 3):
        user.changes += 1
        assert agreed.check(work, known, {"gradient": "x"}, 1) == (tries == 3)
        checks(agreed, work, known)
    assert said == [
        "worker 1 was not compared with the coordinator: the script changed the model during every "
        "comparison"
    ]


def test_one_is_compared_with_what_was_set_when_it_was_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agreed, _ = agreement(monkeypatch, gradients="aabb")
    work, first, second, user = job(), set[str](), set[str](), agreed._arena
    agreed.expect(work, is_first=True)
    assert "gradient" in checks(agreed, work, first)
    user.changes += 1
    assert "gradient" in checks(agreed, work, second)  # for whom it was computed once more
    assert agreed.check(work, first, {"gradient": "a"}, 0)
    with expect_error(UserError):
        agreed.check(work, second, {"gradient": "a"}, 1)


def test_data_are_compared_at_the_same_place_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Told(Drawn):
        def __getitem__(self, row: int) -> torch.Tensor:
            return torch.tensor([float(place_of_rows().step)])

    agreed, _ = agreement(monkeypatch, Told())
    dataset = agreed._datasets["dataset"]
    for step in (3, 5):  # two evaluations
        work = job(dataset, Evaluation)
        work.plan.course = Course(8, (step, 0))
        agreed.expect(work, is_first=False)
        assert checks(agreed, work, known := set[str]()) == ["data"]
        assert agreed.check(work, known, {"data": data_print(work)}, 0)
        assert checks(agreed, work, known) == []


def test_what_a_worker_alone_raises_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    agreed, _ = agreement(monkeypatch)
    work = job()
    agreed.expect(work, is_first=True)
    with pytest.raises(ValueError, match="there alone") as raised:
        agreed.check(work, set(), {"error": to_json(ValueError("there alone"))}, 3)
    assert raised.value.__notes__ == [
        "quorate: worker 3, in the shard that it is compared by: step 0, shard 0, rows [0, 1]; the "
        "coordinator has computed it"
    ]


def test_other_data_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    agreed, _ = agreement(monkeypatch)
    work = job()
    agreed.expect(work, is_first=True)
    with pytest.raises(UserError) as raised:
        agreed.check(work, set(), {"data": "other"}, 0)
    assert str(raised.value) == (
        "a worker that ran the script again has another dataset: its first shard, rows [0, 1], "
        "differs from the coordinator's; seed what the script draws, sort what it takes from a "
        "set, or use engine='towers'"
    )


def test_another_gradient_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    agreed, _ = agreement(monkeypatch)
    work = job()
    agreed.expect(work, is_first=True)
    with expect_error(UserError):
        agreed.check(work, set(), {"gradient": "b"}, 0)


def test_an_evaluation_has_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    agreed, _ = agreement(monkeypatch)
    agreed.expect(job(), is_first=True)
    work = job(kind=Evaluation)
    agreed.expect(work, is_first=False)
    # Its rows are checked though the training's were: they may be augmented there.
    assert checks(agreed, work, set()) == ["data"]


def test_data_that_is_not_repeatable_is_said_and_not_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agreed, said = agreement(monkeypatch, Drawn())
    work = job(next(iter(agreed._datasets.values())))
    agreed.expect(work, is_first=False)
    (line,) = said
    assert line.startswith("the dataset gives different values each time it is loaded")
    assert checks(agreed, work, set()) == []


def test_data_that_raises_is_left_to_the_shard_that_it_belongs_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agreed, said = agreement(monkeypatch, Broken())
    work = job(next(iter(agreed._datasets.values())))
    agreed.expect(work, is_first=False)
    assert (checks(agreed, work, set()), said) == ([], [])


def test_a_gradient_that_is_not_repeatable_is_said_and_not_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agreed, said = agreement(monkeypatch, gradients="ab")
    work = job()
    agreed.expect(work, is_first=True)
    (line,) = said
    assert line.startswith("the same shard gives a different gradient each time")
    assert checks(agreed, work, set()) == ["data"]


def test_who_looks_for_a_difference_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    agreed, _ = agreement(monkeypatch)
    work = job()
    work.is_compared = False
    agreed.expect(work, is_first=True)
    assert checks(agreed, work, set()) == []


def test_what_workers_do_not_have_has_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    agreed, _ = agreement(monkeypatch)
    assert agreed.name_of(ROWS) == "dataset"
    assert agreed.name_of(TensorDataset(torch.zeros(1))) is None
