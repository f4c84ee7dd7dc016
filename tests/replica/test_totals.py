"""Totals: counts summed over shards and finished once, the same on any workers to the last bit."""

from __future__ import annotations

import importlib.util
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.messages import expect_error, expect_message
from support.warm import WARM
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import quorate
from quorate.errors import LossError, SettingError, UserError
from quorate.replica import totals
from quorate.services.report import Report

SCRIPT = Path(__file__).parents[1] / "scripts" / "counted.py"
LIMIT_S = 60
spec = importlib.util.spec_from_file_location("counted", SCRIPT)
assert spec is not None
assert spec.loader is not None
counted = importlib.util.module_from_spec(spec)
spec.loader.exec_module(counted)


def run(run_dir: Path, workers: int, mistake: str = "none") -> tuple[int, str]:
    options = ("--engine", "processes", "--devices", "cpu", "--workers", f"{workers}")
    words = ["run", *options, "--run-dir", str(run_dir), str(SCRIPT), mistake]
    code, out, err = WARM.run(words, os.environ, LIMIT_S)
    return code, out + err


def logged(run_dir: Path) -> list[dict[str, Any]]:
    """Of each update and evaluation what is no matter of time or of who computed it."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    apart = ("examples_per_s", "fresh", "stale", "dropped", "at", "begun_at", "spent")
    return [{k: v for k, v in line.items() if k not in apart} for line in lines]


def of_all_at_once(model: torch.nn.Module) -> dict[str, float]:
    """What an evaluation must give, without shards."""
    x, true = counted.rows(41, 2).tensors
    guess = model(x).argmax(-1)
    found = counted.iou(counted.confusion(true, guess))
    return found | {"bleu": counted.bleu(counted.ngrams(true.tolist(), guess.tolist()))}


@pytest.mark.slow
def test_the_same_numbers_on_towers_and_processes(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        runs = {n: pool.submit(run, tmp_path / f"processes-{n}", n) for n in (1, 2)}
        ended = {n: each.result() for n, each in runs.items()}
    for workers in (1, 2, 3):
        trainer = counted.trainer_of(
            run_dir=tmp_path / f"towers-{workers}",
            devices="cpu",
            workers=quorate.Workers(workers, engine="towers"),
        )
        trainer.fit(
            counted.rows(67, 1),
            epochs=2,
            validation=quorate.Validation(counted.rows(41, 2), best="max:bleu"),
        )
        expected = of_all_at_once(trainer.model)
        found = trainer.evaluate(counted.rows(41, 2))
        assert {name: found[name] for name in expected} == expected
    for code, said in ended.values():
        assert code == 0, said
        assert f"bleu {expected['bleu']:.4f}" in said  # shown
    logs = {path.name: logged(path) for path in tmp_path.iterdir()}
    assert len(logs) == 5
    assert all(log == logs["towers-1"] for log in logs.values())
    validations = [line["validation"] for line in logs["towers-1"] if "validation" in line]
    updates = [line for line in logs["towers-1"] if "validation" not in line]
    assert validations[-1].items() >= expected.items()
    assert len(validations) == 2
    assert len(updates) == 6
    assert 0.2 < expected["bleu"] < 1
    assert 0.3 < expected["mean_iou"] < 1
    assert all("mean_iou" in line and "bleu" not in line for line in updates)  # as it is returned


def test_the_best_checkpoint_by_a_finished_total(tmp_path: Path) -> None:
    trainer = counted.trainer_of(
        run_dir=tmp_path, devices="cpu", workers=quorate.Workers(1, engine="towers")
    )
    trainer.fit(
        counted.rows(67, 1),
        epochs=2,
        validation=quorate.Validation(counted.rows(41, 2), best="max:iou_3"),
    )
    values = [line["validation"]["iou_3"] for line in logged(tmp_path) if "validation" in line]
    records = sorted((tmp_path / "checkpoints").rglob("*.json"))
    assert any(str(max(values)) in record.read_text() for record in records)


def test_a_curve_is_finished_from_all_counts_of_its_interval(tmp_path: Path) -> None:
    trainer = counted.trainer_of(
        run_dir=tmp_path, devices="cpu", workers=quorate.Workers(2, engine="towers")
    )
    trainer.fit(counted.rows(67, 1), epochs=2, validation=counted.rows(41, 2))
    again = counted.trainer_of(devices="cpu", workers=quorate.Workers(1, engine="towers"))
    reports: list[Report] = list(again.updates(counted.rows(67, 1), epochs=2))
    total = sum(report.totals["confusion"] for report in reports)
    assert int(total.sum()) == 2 * 67 * counted.LENGTH
    expected = counted.iou(total)["mean_iou"]
    mean_of_means = sum(report.metrics["mean_iou"] for report in reports) / len(reports)
    events = EventAccumulator(str(tmp_path / "summaries")).Reload()
    points = [point.value for point in events.Scalars("mean_iou")]
    assert points == [pytest.approx(expected, rel=1e-6)]  # the run is shorter than an interval
    assert points != [pytest.approx(mean_of_means, rel=1e-4)]
    assert [p.step for p in events.Scalars("validation/bleu")] == [3, 6]


MISTAKES = {
    "float": "total 'confusion'",
    "shape": "total 'confusion'",
    "absent": "totals",
    "unlisted": "metric 'confusions'",
    "text": "totals['confusion']",
    "taken": "totals['bleu']",
    "loss": "totals['confusion']",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named(mistake: str) -> None:
    trainer = counted.trainer_of(
        mistake, devices="cpu", workers=quorate.Workers(2, engine="towers")
    )
    with pytest.raises(LossError) as raised:
        trainer.evaluate(counted.rows(41, 2))
    assert raised.value.name == MISTAKES[mistake]
    if mistake not in ("absent", "shape"):  # these name two shards, in the order they are added
        expect_message(raised.value)


def test_what_finish_raises_is_the_users_own_and_the_state_is_saved(tmp_path: Path) -> None:
    trainer = counted.trainer_of(
        "raises", devices="cpu", workers=quorate.Workers(1, engine="towers"), run_dir=tmp_path
    )
    with pytest.raises(ArithmeticError, match="no number from 207 counts") as raised:
        trainer.fit(counted.rows(67, 1))
    assert raised.value.__notes__ == ["quorate: in totals['confusion'], of a total of shape (5, 5)"]
    # The update whose metrics it was is made, and counted: what is saved is a whole number of them.
    assert trainer.global_step == 1
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000000000001"]


def test_a_mistake_in_a_worker_process_is_one_line(tmp_path: Path) -> None:
    code, said = run(tmp_path, 1, "shape")
    assert code == 2
    assert "total 'confusion': got shape " in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("name", "got", "wrong"),
    [
        ("totals", "list", [("confusion", sum)]),
        ("totals", "weight", {"weight": sum}),
        ("totals['confusion']", "int", {"confusion": 4}),
    ],
)
def test_settings_that_cannot_work(name: str, got: str, wrong: Any) -> None:
    with expect_error(SettingError, name=name, got=got):
        totals.Totals(wrong)


def test_means_keep_their_names() -> None:
    with expect_error(UserError, name="totals", got="a number under the name 'accuracy'"):
        totals.joined({"loss": 1.0, "accuracy": 0.5}, {"accuracy": 0.5})


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.lists(st.integers(-(2**63), 2**63 - 1), min_size=4, max_size=4), min_size=1, max_size=6
    ),
    st.sampled_from([(4,), (2, 2), (1, 4, 1)]),
)
def test_any_order_gives_the_exact_sum_and_processes_send_the_same(
    shards: list[list[int]], shape: tuple[int, ...]
) -> None:
    shards = [[value // len(shards) for value in each] for each in shards]
    sent = [{"n": torch.tensor(each).view(shape)} for each in shards]
    found = [totals.from_json(json.loads(json.dumps(totals.to_json(each)))) for each in sent]
    assert all(torch.equal(a["n"], b["n"]) for a, b in zip(sent, found, strict=True))
    for order in (found, found[::-1]):
        total = {"n": torch.zeros(shape, dtype=torch.int64)}
        for each in order:
            totals.add(total, each)
        assert total["n"].flatten().tolist() == [
            sum(column) for column in zip(*shards, strict=True)
        ]


@pytest.mark.parametrize("dtype", totals.DTYPES)
def test_integers_of_every_width_are_counted(dtype: torch.dtype) -> None:
    value = torch.iinfo(dtype).max
    assert totals.counts("n", torch.tensor([value], dtype=dtype)).tolist() == [value]


def test_what_is_counted_is_a_copy() -> None:
    state = torch.arange(3)
    found = totals.counts("n", state)
    state += 1
    assert found.tolist() == [0, 1, 2]
    assert totals.counts("n", 7).item() == 7  # a plain number
    assert totals.from_json(totals.to_json({"none": torch.zeros(0, 3, dtype=torch.int64)}))[
        "none"
    ].shape == (0, 3)
