"""Totals: counts summed over shards and finished once, the same on any workers to the last bit."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.messages import expect_error, expect_message
from support.runs import command, run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.data import TensorDataset

import quorate
from quorate.errors import LossError, SettingError, UserError
from quorate.replica import totals
from quorate.services.report import Report

CLASSES, LENGTH, FEATURES = 5, 9, 6


def rows(count: int, seed: int) -> TensorDataset:
    """Sentences of "words": (LENGTH, FEATURES) to a class each."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, LENGTH, FEATURES, generator=draw)
    noise = torch.randn(count, LENGTH, CLASSES, generator=draw)
    return TensorDataset(x, (x[..., :CLASSES] + 0.7 * noise).argmax(-1))


def confusion(true: torch.Tensor, guess: torch.Tensor) -> torch.Tensor:
    cells = (CLASSES * true + guess).flatten()
    return torch.bincount(cells, minlength=CLASSES**2).view(CLASSES, CLASSES)


def iou(total: torch.Tensor) -> dict[str, float]:
    both = total.diagonal().double()
    each = both / (total.sum(0) + total.sum(1) - both)
    return {"mean_iou": float(each.mean())} | {f"iou_{n}": float(v) for n, v in enumerate(each)}


def score(total: torch.Tensor) -> float:
    """Return a number other than a sum of means: of the right words and all words."""
    right, words = total.double()
    return float(torch.exp(1 - words / right))


def loss_but(mistake: str) -> Any:
    def loss(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, Any]:
        x, true = batch
        logits = model(x)
        guess = logits.argmax(-1)
        matrix = confusion(true, guess)
        found = {
            "loss": F.cross_entropy(logits.flatten(0, 1), true.flatten()),
            "confusion": matrix,
            "weight": true.numel(),
        }
        if model.training:
            return found
        found["score"] = torch.stack([(true == guess).sum(), torch.tensor(true.numel())])
        match mistake:
            case "float":
                found["confusion"] = matrix / 2
            case "shape":
                found["confusion"] = torch.bincount(guess.flatten()[: int(x[0, 0, 0] > 0) * 4])
            case "absent" if x[0, 0, 0] > 0:
                del found["confusion"]
        return found

    return loss


def broken(total: torch.Tensor) -> float:
    raise ArithmeticError(f"no number from {total.sum()} counts")


def trainer_of(mistake: str = "none", **options: Any) -> quorate.Trainer:
    finish: Any = {
        "raises": broken,
        "text": lambda _: {"mean_iou": "high"},
        "taken": lambda _: {"mean_iou": 1.0, "score": 1.0},
    }.get(mistake, iou)
    torch.manual_seed(0)
    return quorate.Trainer(
        nn.Linear(FEATURES, CLASSES),
        loss_but(mistake),
        totals={"confusion": finish, "score": score},
        optimizer=lambda params: torch.optim.SGD(params, lr=0.5),
        batch_size=23,
        shards=5,
        **options,
    )


def logged(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of updates and evaluations, without times and the names of workers."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    apart = ("examples_per_s", "fresh", "stale", "dropped", "at", "begun_at", "spent")
    return [{k: v for k, v in line.items() if k not in apart} for line in lines]


def of_all_at_once(model: torch.nn.Module) -> dict[str, float]:
    """Return the expected result of an evaluation, without shards."""
    x, true = rows(41, 2).tensors
    guess = model(x).argmax(-1)
    found = iou(confusion(true, guess))
    counts = torch.tensor([int((true == guess).sum()), true.numel()])
    return found | {"score": score(counts)}


ON_PROCESSES = f"""
import sys
sys.path[:] = {sys.path} + [{str(Path(__file__).parent)!r}]
import quorate
from test_totals import rows, trainer_of
trainer_of().fit(rows(67, 1), epochs=2, validation=quorate.Validation(rows(41, 2)))
"""


def test_the_same_numbers_on_towers_and_processes(tmp_path: Path) -> None:
    (script := tmp_path / "script.py").write_text(ON_PROCESSES)
    options = ("--engine", "processes", "--workers", "2")
    ended = run(command(script, options=(*options, "--run-dir", str(tmp_path / "processes"))))
    script.unlink()
    assert ended.code == 0, ended.said
    for count in (1, 3):
        workers = quorate.Workers(count, engine="towers")
        run_dir = tmp_path / f"towers-{count}"
        trainer = trainer_of(run_dir=run_dir, devices="cpu", workers=workers)
        validation = quorate.Validation(rows(41, 2), best="max:score")
        trainer.fit(rows(67, 1), epochs=2, validation=validation)
        expected = of_all_at_once(trainer.model)
        found = trainer.evaluate(rows(41, 2))
        assert {name: found[name] for name in expected} == expected
    assert f"score {expected['score']:.4f}" in ended.out
    logs = [logged(path) for path in tmp_path.iterdir()]
    assert logs == [logs[0]] * 3
    validations = [line["validation"] for line in logs[0] if "validation" in line]
    updates = [line for line in logs[0] if "validation" not in line]
    assert validations[-1].items() >= expected.items()
    assert (len(validations), len(updates)) == (2, 6)
    assert 0.2 < expected["score"] < 1
    assert 0.3 < expected["mean_iou"] < 1
    assert all("mean_iou" in line and "score" not in line for line in updates)  # as returned
    records = sorted((run_dir / "checkpoints").rglob("*.json"))
    best = max(line["score"] for line in validations)
    assert any(str(best) in record.read_text() for record in records)


def test_a_curve_is_finished_from_all_counts_of_its_interval(tmp_path: Path) -> None:
    options: dict[str, Any] = {"devices": "cpu", "workers": quorate.Workers(2, engine="towers")}
    trainer = trainer_of(run_dir=tmp_path, **options)
    trainer.fit(rows(67, 1), epochs=2, validation=rows(41, 2))
    again = trainer_of(**options)
    reports: list[Report] = list(again.updates(rows(67, 1), epochs=2))
    total = sum(report.totals["confusion"] for report in reports)
    assert int(total.sum()) == 2 * 67 * LENGTH
    expected = iou(total)["mean_iou"]
    mean_of_means = sum(report.metrics["mean_iou"] for report in reports) / len(reports)
    events = EventAccumulator(str(tmp_path / "summaries")).Reload()
    points = [point.value for point in events.Scalars("mean_iou")]
    assert points == [pytest.approx(expected, rel=1e-6)]  # the run is shorter than an interval
    assert points != [pytest.approx(mean_of_means, rel=1e-4)]
    assert [p.step for p in events.Scalars("validation/score")] == [3, 6]


MISTAKES = {
    "float": "total 'confusion'",
    "shape": "total 'confusion'",
    "absent": "totals",
    "text": "totals['confusion']",
    "taken": "totals['score']",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named(mistake: str) -> None:
    trainer = trainer_of(mistake, devices="cpu", workers=quorate.Workers(2, engine="towers"))
    with pytest.raises(LossError) as raised:
        trainer.evaluate(rows(41, 2))
    assert raised.value.name == MISTAKES[mistake]
    if mistake not in ("absent", "shape"):  # these name two shards, in the order they are added
        expect_message(raised.value)


def test_what_finish_raises_is_the_users_own_and_the_state_is_saved(tmp_path: Path) -> None:
    trainer = trainer_of(
        "raises", devices="cpu", workers=quorate.Workers(1, engine="towers"), run_dir=tmp_path
    )
    with pytest.raises(ArithmeticError, match="no number from 207 counts") as raised:
        trainer.fit(rows(67, 1))
    assert raised.value.__notes__ == ["quorate: in totals['confusion'], of a total of shape (5, 5)"]
    # The update with these metrics is made, and counted: only a whole number of updates is saved.
    assert trainer.global_step == 1
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000000000001"]


def test_names_that_cannot_be_are_refused() -> None:
    with expect_error(UserError, name="totals", got="a number under the name 'accuracy'"):
        totals.merge_metrics({"loss": 1.0, "accuracy": 0.5}, {"accuracy": 0.5})
    with expect_error(SettingError, name="totals", got="weight"):
        totals.Totals({"weight": sum})


def test_what_is_counted_is_a_copy_of_integers_of_every_width() -> None:
    for dtype in totals.DTYPES:
        value = torch.iinfo(dtype).max
        assert totals.counts("n", torch.tensor([value], dtype=dtype)).tolist() == [value]
    state = torch.arange(3)
    found = totals.counts("n", state)
    state += 1
    assert found.tolist() == [0, 1, 2]
    assert totals.counts("n", 7).item() == 7  # a plain number
