"""Whether a worker is the same as the coordinator: what is compared, and what is said."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from quorate.coordination.plan import Plan
from quorate.data.feed import Source
from quorate.errors import UserError
from quorate.machine.devices import Group
from quorate.replica.fingerprint import fingerprint
from quorate.replica.flat import Layout
from quorate.transports.job import Evaluation, Training
from quorate.transports.processes import agreement as agreements
from quorate.transports.processes.agreement import Agreement

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
    return Agreement(model, probe, groups, datasets, threads=1, say=said.append), said


def data_print(work: Any) -> str:
    return fingerprint(work.source.load((0, 0)).data)


def test_one_that_is_the_same_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    agreed, said = agreement(monkeypatch)
    work, known = job(), set[str]()
    agreed.expect(work, is_first=True)
    assert agreed.checks(work, known, is_first=True) == ["data", "gradient"]
    answer = {"data": data_print(work), "gradient": "a"}
    agreed.check(work, known, answer, is_first=True)
    assert agreed.checks(work, known, is_first=True) == ["gradient"]
    # After an update parameters are others, and so is the gradient.
    assert agreed.checks(work, known, is_first=False) == []
    assert agreed.checks(work, set(), is_first=False) == ["data"]
    assert agreed.checks(work, set(), is_first=True) == ["data", "gradient"]  # another process
    assert said == []


def test_other_data_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    agreed, _ = agreement(monkeypatch)
    work = job()
    agreed.expect(work, is_first=True)
    with pytest.raises(UserError) as raised:
        agreed.check(work, set(), {"data": "other"}, is_first=True)
    assert str(raised.value) == (
        "a worker that ran the script again has another dataset: its first shard, rows [0, 1], "
        "differs from the coordinator's; seed what the script draws, sort what it takes from a "
        "set, or use engine='towers'"
    )


def test_another_gradient_is_refused_before_the_first_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agreed, _ = agreement(monkeypatch)
    work = job()
    agreed.expect(work, is_first=True)
    with pytest.raises(UserError, match="computes another gradient from the same rows"):
        agreed.check(work, set(), {"gradient": "b"}, is_first=True)
    agreed.check(work, set(), {"gradient": "b"}, is_first=False)  # it was late


def test_an_evaluation_has_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    agreed, _ = agreement(monkeypatch)
    agreed.expect(job(), is_first=True)
    work = job(kind=Evaluation)
    agreed.expect(work, is_first=False)
    # Its rows are checked though the training's were: they may be augmented there.
    assert agreed.checks(work, set(), is_first=True) == ["data"]


def test_data_that_is_not_repeatable_is_said_and_not_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agreed, said = agreement(monkeypatch, Drawn())
    work = job(next(iter(agreed._datasets.values())))
    agreed.expect(work, is_first=False)
    assert said == [
        "the dataset gives other values each time it is loaded: bits are not repeatable (it draws "
        "from a generator of its own?)"
    ]
    assert agreed.checks(work, set(), is_first=False) == []


def test_data_that_raises_is_left_to_the_shard_that_it_belongs_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agreed, said = agreement(monkeypatch, Broken())
    work = job(next(iter(agreed._datasets.values())))
    agreed.expect(work, is_first=False)
    assert (agreed.checks(work, set(), is_first=False), said) == ([], [])


def test_a_gradient_that_is_not_repeatable_is_said_and_not_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agreed, said = agreement(monkeypatch, gradients="ab")
    work = job()
    agreed.expect(work, is_first=True)
    (line,) = said
    assert line.startswith("the same shard gives another gradient each time it is computed")
    assert agreed.checks(work, set(), is_first=True) == ["data"]


def test_who_looks_for_a_difference_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    agreed, _ = agreement(monkeypatch)
    work = job()
    work.is_compared = False
    agreed.expect(work, is_first=True)
    assert agreed.checks(work, set(), is_first=True) == []


def test_what_workers_do_not_have_has_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    agreed, _ = agreement(monkeypatch)
    assert agreed.name_of(ROWS) == "dataset"
    assert agreed.name_of(TensorDataset(torch.zeros(1))) is None
