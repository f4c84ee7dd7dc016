"""The best checkpoint stays, by a metric that has to be there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.messages import expect_error
from support.small import DATA, Small, loss, trainer
from torch import nn

import quorate
from quorate.errors import SettingError
from quorate.services.checkpoints import files


def test_the_best_checkpoint_stays(tmp_path: Path) -> None:
    values = iter([0.3, 0.9, 0.5, 0.7, 0.8, 0.6, 0.4, 0.2])

    def scored(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"loss": loss(model, batch), "score": torch.tensor(score)}

    score = next(values)

    class Next(quorate.Callback):
        def evaluated(self, global_step: int, metrics: dict[str, float]) -> None:
            nonlocal score
            score = next(values, 0.0)

    def run(steps: int) -> None:
        one = quorate.Trainer(
            Small,
            scored,
            optimizer=torch.optim.Adam,
            batch_size=12,
            shards=4,
            devices="cpu",
            run_dir=quorate.RunDir(tmp_path, keep=2, save_every_steps=1),
        )
        one.fit(
            DATA,
            callbacks=[Next()],
            steps=steps,
            validation=quorate.Validation(DATA, every_steps=1, best="max:score"),
        )

    run(4)
    run(8)
    there = [one.global_step for one in files.listing(tmp_path)]
    assert there == [8, 7, 2]
    found = files.find(tmp_path)
    assert found is not None
    assert found.record["account"]["best"] == {
        "metric": "score",
        "value": pytest.approx(0.9),
        "global_step": 2,
    }


@pytest.mark.parametrize("best", ["accuracy", "max:", "more:loss"])
def test_a_best_that_is_none_is_refused(best: str) -> None:
    with expect_error(SettingError, name="best"):
        trainer(None).fit(
            DATA,
            validation=quorate.Validation(DATA, best=best),
        )
    with expect_error(SettingError, name="best", got="min:loss"):
        trainer(None).fit(DATA, best="min:loss")
    with expect_error(SettingError, name="best", got="speed"):
        trainer(None).fit(
            DATA,
            steps=1,
            validation=quorate.Validation(DATA, best="max:speed"),
        )
