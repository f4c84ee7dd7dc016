"""Runs whose rows are sampled, or whose last batch is another: bits, resumes, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import front_door
from support.messages import expect_error
from torch.utils.data import TensorDataset

import quorate
from quorate.coordination.plan import Plan
from quorate.coordination.sampling import Sampling
from quorate.data.source import Source
from quorate.errors import CheckpointError, SettingError
from quorate.replica.digest import digest
from quorate.transports.job import Training
from quorate.transports.ray.open_job import OpenJob

DATA = TensorDataset(torch.arange(40.0)[:, None], torch.arange(40.0)[:, None] ** 2 / 100)
WEIGHTS = torch.arange(40.0) % 7


def trainer(run_dir: Path | None = None, workers: int = 1, **options: Any) -> quorate.Trainer:
    return front_door.trainer(
        lambda: torch.nn.Linear(1, 1),
        lambda model, batch: (model(batch[0] / 40) - batch[1]).square().mean(),
        **{
            "optimizer": lambda params: torch.optim.Adam(params, lr=0.01),
            "batch_size": 12,
            "shards": 3,
            "devices": "cpu",
            "workers": workers,
            "run_dir": run_dir,
        }
        | options,
    )


def digest_of(run: quorate.Trainer) -> str:
    return digest(run.model.state_dict().items())


WORK = f"{Training.__module__}:{Training.__qualname__}"
WAYS: dict[str, dict[str, Any]] = {
    "none": {},
    "weights": {"sampling": WEIGHTS},
    "balanced": {"sampling": quorate.Sampling.balanced([row // 36 for row in range(40)])},
    "more": {"sampling": quorate.Sampling(WEIGHTS, rows=66)},
    "once": {"sampling": quorate.Sampling(WEIGHTS, rows=20, replacement=False)},
    "drop": {"last": "drop"},
    "join": {"last": "join"},
    "few": {"sampling": quorate.Sampling(WEIGHTS, rows=30), "last": "join"},
}


@pytest.mark.parametrize("update", ["sync", "async"])
@pytest.mark.parametrize("way", WAYS)
def test_each_epoch_has_the_updates_that_the_plan_says(way: str, update: str) -> None:
    rows = {"more": [12] * 5 + [6], "once": [12, 8], "drop": [12] * 3, "join": [12, 12, 16]}
    expected = rows.get(way, [12, 12, 12, 4]) if way != "few" else [12, 18]
    run = trainer(update=update, **WAYS[way])
    reports = list(run.updates(DATA, epochs=2))
    assert sum(report.rows for report in reports) == 2 * sum(expected)
    if update == "sync":
        assert [report.rows for report in reports] == 2 * expected
    assert len(reports) == 2 * run.updates_per_epoch(DATA)
    assert [report.epoch for report in reports if report.ends_epoch] == [0, 1]
    # Where rows are dropped in training, an evaluation has them.
    loss = torch.nn.functional.mse_loss(run.model(DATA.tensors[0] / 40), DATA.tensors[1]).item()
    assert run.evaluate(DATA)["loss"] == pytest.approx(loss, rel=1e-5)


def test_bits_follow_from_the_sampling_and_not_from_the_workers(tmp_path: Path) -> None:
    digests = {}
    for way, options in WAYS.items():
        for workers in (1, 2):
            run = trainer(workers=workers, **options)
            run.fit(DATA, epochs=3)
            digests[way, workers] = digest_of(run)
        assert digests[way, 1] == digests[way, 2], way
    assert len(set(digests.values())) == len(WAYS)
    for way in ("weights", "once", "join"):
        # In the middle of an epoch, and to its end elsewhere.
        trainer(tmp_path / way, **WAYS[way]).fit(DATA, steps=4)
        resumed = trainer(tmp_path / way, workers=2, **WAYS[way])
        resumed.fit(DATA, epochs=3)
        assert digest_of(resumed) == digests[way, 1]


@pytest.mark.parametrize(
    ("way", "others", "name"),
    [
        ("weights", ["none", "balanced", "more", "once"], "sampling"),
        ("none", ["weights"], "sampling"),
        ("join", ["none", "drop"], "last"),
        ("none", ["drop"], "last"),
    ],
)
def test_other_weights_or_another_last_batch_are_another_run(
    tmp_path: Path, way: str, others: list[str], name: str
) -> None:
    trainer(tmp_path, **WAYS[way]).fit(DATA, steps=2)
    for other in others:
        with expect_error(CheckpointError):
            trainer(tmp_path, **WAYS[other]).fit(DATA, steps=3)
    trainer(tmp_path, **WAYS[way]).fit(DATA, steps=3)


@pytest.mark.parametrize(
    ("name", "got", "options"),
    [
        ("sampling", "39 weights", {"sampling": [1.0] * 39}),
        ("last", "keep", {"last": "keep"}),
        ("shards", 3, {"sampling": quorate.Sampling(WEIGHTS, rows=2)}),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    name: str, got: object, options: dict[str, Any]
) -> None:
    with expect_error(SettingError, name=name, got=got):
        trainer(**options).fit(DATA)


@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("none", None),
        ("more", "an epoch: 66 rows, drawn from 40 with replacement"),
        ("once", "an epoch: 20 rows, drawn from 40 without replacement"),
        ("drop", "an epoch: the last 4 rows are in no batch"),
        (
            "few",
            "an epoch: 30 rows, drawn from 40 with replacement; the last batch has 18 rows",
        ),
    ],
)
def test_an_epoch_that_is_not_each_row_once_is_said(
    way: str, said: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer(**WAYS[way]).fit(DATA, steps=1)
    lines = [line for line in capsys.readouterr().out.splitlines() if "an epoch:" in line]
    assert lines == ([] if said is None else [said])


def test_sampled_rows_have_no_order_of_their_own() -> None:
    with expect_error(SettingError, name="shuffle", got=False):
        trainer(sampling=WEIGHTS).fit(DATA, shuffle=False)


class Drawing:
    """Rows that say what was drawn for them."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, row: int) -> tuple[int, torch.Tensor]:
        return row, torch.rand(())


def test_a_row_that_comes_again_in_an_epoch_draws_other_numbers() -> None:
    """By itself, and in ``augment``; its first time is that of a run without sampling."""

    def augment(batch: Any, draws: quorate.Draws) -> Any:
        return [*batch, draws.uniform()[:, 0]]

    def drawn(plan: Plan) -> list[tuple[float, ...]]:
        source = Source(Drawing(), plan, augment=augment)
        loaded = [
            source.load((step, s)).data for step in range(2) for s in range(plan.shards_of(step))
        ]
        return [row for batch in loaded for row in zip(*(x.tolist() for x in batch), strict=True)]

    arguments: dict[str, Any] = {"rows": 3, "shards": 2, "seed": 1}
    sampled = drawn(Plan(**arguments, batch_size=15, sampling=Sampling([1, 1, 5], rows=30)))
    assert len({numbers for _, *numbers in sampled for numbers in numbers}) == 60
    plain = {row: numbers for row, *numbers in drawn(Plan(**arguments, batch_size=2))}
    first: dict[float, list[float]] = {}
    for row, *numbers in sampled:
        first.setdefault(row, numbers)
    assert first == plain


@pytest.mark.parametrize("rows", [30, 66])
def test_a_hand_of_another_node_knows_how_many_shards_a_step_has(rows: int) -> None:
    """It has no weights: it orders what workers compute, which have them."""
    plan = Plan(rows=40, batch_size=12, shards=8, sampling=Sampling(WEIGHTS, rows=rows))
    sent = {"plan": plan.to_json(), "steps": [0, 9], "averaged": False, "work": WORK}
    job = OpenJob.of(sent)
    steps = range(2 * plan.steps_per_epoch)
    assert [job.plan.shards_of(step) for step in steps] == [plan.shards_of(step) for step in steps]
