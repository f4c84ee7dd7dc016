"""Update rules: whole reads, ends of loops, saves in the middle, long evaluations, one worker.

The rules' books over a run with kills are in ``test_scenarios``.
"""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support import front_door
from support.digests import digest_of
from support.fits import fit, sgd
from support.runs import command, last_json, run
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import quorate


@pytest.mark.slow
def test_what_a_worker_reads_is_what_one_update_left_behind() -> None:
    """Make a hundred updates while shards are computed; each shard names the state it read."""
    options = ("--workers", "3", "--shards", "6", "--update", "async", "--engine", "processes")
    ended = run(command("torn.py", "100", options=options))
    assert ended.code == 0, ended.said
    found = last_json(ended.out)
    assert found["updates"] == 100
    # The test is valid only if updates were made while shards were computed.
    assert sum(count for age, count in found["staleness"] if age) > 50, found


class Drawn(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Rows with draws."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(6) + row % 3
        return x, x.sum(0, keepdim=True).sign()


def test_on_one_worker_async_is_sync_with_batches_of_a_shard() -> None:
    def trained(**settings: Any) -> str:
        def net() -> nn.Module:
            return nn.Sequential(
                nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1)
            )

        adam = {"optimizer": lambda params: torch.optim.Adam(params, lr=1e-2), "ema_decay": 0.9}
        return digest_of(fit(net, data=Drawn(), workers=1, epochs=2, **adam, **settings))

    expected = trained(batch_size=3, shards=1)
    for update in ("async", "bounded:0", "bounded:3"):
        assert trained(batch_size=12, shards=4, update=update) == expected


# --- loops left early, and resumed ----------------------------------------------------------------

ROWS = 11  # an epoch has three batches of four shards
DATA = TensorDataset(torch.arange(ROWS), torch.linspace(-1, 1, ROWS).reshape(-1, 1))


def loss(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a loss with a metric whose sum has a digit to the base of 16 for each row."""
    time.sleep(float(torch.rand(())) * 0.004)
    rows, x = batch
    return {"loss": (model(x) - 1).square().mean(), "rows": (16.0 ** rows.double()).mean()}


def trainer(run_dir: Path | None = None, workers: int = 3, **options: Any) -> quorate.Trainer:
    settings = {"optimizer": sgd, "batch_size": 4, "shards": 4, "devices": "cpu", **options}
    settings |= {"engine": "towers", "workers": workers, "run_dir": run_dir, "ema_decay": 0.9}
    return front_door.trainer(lambda: nn.Linear(1, 1), loss, **settings)


def require_each_row_once(reports: list[quorate.Report], epochs: int) -> None:
    total = sum(round(r.metrics["rows"] * r.rows) for r in reports)
    assert f"{total:x}" == ROWS * f"{epochs:x}"
    assert [report.global_step for report in reports] == list(range(1, len(reports) + 1))


@pytest.mark.parametrize("update", ["async", "bounded:2"])
def test_a_save_in_the_middle_of_a_loop_is_where_another_trainer_goes_on(
    update: str, tmp_path: Path
) -> None:
    reports: list[quorate.Report] = []
    first = trainer(tmp_path, update=update)
    for stop_at in (5, 6, 17):  # a loop left early goes on in the next
        for report in first.updates(DATA, epochs=4):
            reports.append(report)
            if report.global_step == stop_at:
                first.save()
                break
    reports += trainer(tmp_path, workers=2, update=update).updates(DATA, epochs=4)
    require_each_row_once(reports, 4)


def test_averaged_weights_are_those_of_the_updates_in_their_order() -> None:
    run = trainer(update="async")
    shadow = [p.detach().double().clone() for p in run.model.parameters()]
    stale = 0
    for report in run.updates(DATA, epochs=5):
        stale += report.staleness > 0
        d = min(0.9, (1 + report.global_step) / (10 + report.global_step))
        for mine, parameter in zip(shadow, run.model.parameters(), strict=True):
            mine -= (1 - d) * (mine - parameter.detach().double())
    assert run.averaged_model is not None
    for mine, theirs in zip(shadow, run.averaged_model.parameters(), strict=True):
        assert torch.allclose(mine, theirs.detach().double(), atol=1e-6)
    assert stale > 10


EVALUATES = """
import time, torch, quorate
def loss(model, batch):
    time.sleep(0.02 if model.training else 0.16)
    return model(batch).square().mean()
trainer = quorate.Trainer(lambda: torch.nn.Linear(3, 1), loss, batch_size=4, shards=4,
    optimizer=lambda p: torch.optim.SGD(p, lr=1e-3), update="bounded:2",
    workers=quorate.Workers(timeout_s=5))
for report in trainer.updates(torch.ones(40, 3), steps=20):
    if report.global_step == 10:
        began = time.monotonic()
        trainer.evaluate(torch.ones(80, 3))
        assert time.monotonic() - began > 5
"""


@pytest.mark.slow
def test_an_evaluation_that_takes_longer_than_the_timeout_gets_no_worker_killed(
    tmp_path: Path,
) -> None:
    (script := tmp_path / "script.py").write_text(EVALUATES)
    ended = run(command(script, options=("--workers", "2")))
    assert ended.code == 0, ended.said
    assert "another is starting" not in ended.said
