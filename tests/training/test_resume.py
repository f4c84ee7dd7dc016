"""Saving and resuming: the state is whole, or is not loaded; later changes are reported."""

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.digests import digest, digest_of
from support.fits import Calls, fit
from support.forgery.forged import Forged
from support.messages import expect_error
from support.runs import inspected
from support.small import DATA, Small, trainer
from torch import nn
from torch.utils.data import TensorDataset

import quorate
from quorate.errors import SameBitsError


def newest(run_dir: Path) -> Path:
    return max((run_dir / "checkpoints").iterdir())


def test_a_resume_in_the_middle_of_an_epoch_on_other_workers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = trainer(None, workers=1)
    whole.fit(DATA, steps=13)
    trainer(tmp_path, workers=3).fit(DATA, steps=9)
    resumed = trainer(tmp_path, workers=2)
    resumed.fit(DATA, steps=13)
    assert "resumed step 9 (epoch 2, 80%) from" in capsys.readouterr().out
    assert digest_of(resumed) == digest_of(whole)
    # Saved weights load into plain torch, and there is nothing to do in a finished run.
    plain, averaged = Small(), Small()
    plain.load_state_dict(load_file(newest(tmp_path) / "model.safetensors"))
    averaged.load_state_dict(load_file(newest(tmp_path) / "averaged.safetensors"))
    both = [*plain.state_dict().items(), *averaged.state_dict().items()]
    assert digest(both) == digest_of(whole)
    done = trainer(tmp_path)
    assert done.evaluate(DATA) == whole.evaluate(DATA)  # of the saved state
    done.fit(DATA, steps=13)
    assert "nothing to do: 13 of 13 updates are done" in capsys.readouterr().out
    assert digest_of(done) == digest_of(whole)


def test_an_update_that_was_cut_off_is_neither_saved_nor_continued(tmp_path: Path) -> None:
    class Interrupted(torch.optim.SGD):
        steps = 0

        def step(self, closure: Any = None) -> None:
            Interrupted.steps += 1
            if Interrupted.steps == 3:
                raise KeyboardInterrupt
            super().step(closure)

    run = trainer(tmp_path, optimizer=lambda p: Interrupted(p, lr=0.1, momentum=0.9))
    with pytest.raises(KeyboardInterrupt):
        run.fit(DATA, epochs=2)
    assert not list(tmp_path.glob("checkpoints/*"))
    with expect_error(quorate.UserError):
        run.save()
    with expect_error(quorate.UserError):
        run.fit(DATA, epochs=2)


# --- changes since the save -----------------------------------------------------------------------

NUMBERS = torch.arange(48, dtype=torch.float32).reshape(48, 1)
StepLR = torch.optim.lr_scheduler.StepLR
Sgd = partial(torch.optim.SGD, lr=1e-5)


def train(run_dir: Path, steps: int, data: Any = None, **settings: Any) -> None:
    def squared(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[0]).square().mean()

    data = TensorDataset(NUMBERS) if data is None else data
    torch.manual_seed(0)
    defaults = {"optimizer": Sgd, "shards": 2, "workers": 1, "run_dir": run_dir}
    fit(nn.Linear(1, 1), squared, data, steps=steps, **defaults | settings)


def test_other_rows_of_the_same_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = NUMBERS.clone()
    other[-1] += 1
    train(tmp_path, 3)
    train(tmp_path, 5, TensorDataset(other))
    printed, doubts = capsys.readouterr().out, inspected(tmp_path)["doubts"]
    (said,) = doubts
    assert said.startswith("the dataset has different values in 1 of ")
    assert said.endswith(" compared rows, first in row 47, since step 3")
    assert f"same bits: no, because {said}" in printed
    assert inspected(tmp_path)["same_bits"] is False
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line.get("doubts") for line in lines] == [None, None, None, [said], None]
    # The doubt stays with the run, and is not reported again.
    train(tmp_path, 6, TensorDataset(other))
    assert "same bits: no" not in capsys.readouterr().out
    assert inspected(tmp_path)["doubts"] == [said]


def test_another_schedule_and_another_processor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = {"ema_decay": 0.9, "schedule": partial(StepLR, step_size=4)}
    train(tmp_path, 3, **usual)
    forged = Forged(newest(tmp_path), random.Random(0))
    forged.record["processors"] = ["Maker AVX512"]
    forged.write()
    train(tmp_path, 5, **usual | {"schedule": partial(StepLR, step_size=5)})
    printed = capsys.readouterr().out
    said = "step_size of the schedule was 4 and is 5 in the script since step 3"
    assert f"same bits: no, because {said}" in printed
    assert said in inspected(tmp_path)["doubts"]
    assert "processors was ['Maker AVX512'] and is [" in printed


def test_a_strict_run_does_not_go_on_with_what_is_other(tmp_path: Path) -> None:
    train(tmp_path, 3, strict=True)
    with expect_error(SameBitsError, name="strict"):
        train(tmp_path, 5, strict=True, clip_norm=1.0)
    assert inspected(tmp_path)["global_step"] == 3


# --- a script with several fits, started again ----------------------------------------------------

FITS, UPDATES = 4, 4


class CutOff(Exception):  # noqa: N818
    """Ends a script as a kill would, with a checkpoint of the update before."""


def rows_of(model: Any, number: int, rows: int = 32) -> TensorDataset:
    """Return rows that follow from the model, like a policy's rows."""
    x = torch.randn(rows, 6, generator=torch.Generator().manual_seed(number))
    with torch.no_grad():
        return TensorDataset(x, model.first(x)[:, :1].tanh())


def several(run_dir: Path, keep: int = 5) -> quorate.Trainer:
    return trainer(run_dir, 1, batch_size=8, shards=2, keep=keep, summary_every_s=None)


def script(run_dir: Path, *, killed_at: int | None = None, keep: int = 5, **rows: int) -> str:
    """Train like a script of policy gradients; return the final digest."""

    def updated(_: Any, report: quorate.Report) -> None:
        if report.global_step == killed_at:
            raise CutOff

    made = several(run_dir, keep)
    for number in range(FITS):
        data = rows_of(made.model, number, **rows)
        made.fit(data, steps=(number + 1) * UPDATES, callbacks=[Calls(updated)])
    return digest(made.model.state_dict().items())


@pytest.mark.parametrize("killed_at", [4, 13])
def test_a_script_that_is_started_again_ends_as_if_it_had_not_been_killed(
    killed_at: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    undisturbed = script(tmp_path / "whole")
    with pytest.raises(CutOff):
        script(tmp_path / "run", killed_at=killed_at)
    capsys.readouterr()
    assert script(tmp_path / "run") == undisturbed
    said = capsys.readouterr().out
    assert "same bits: no" not in said
    for earlier in range(UPDATES, killed_at, UPDATES):
        text = f"this fit ends after update {earlier}, and the run has made {killed_at}; until"
        assert text in said
    # The run is done now, and stays done at another start.
    assert script(tmp_path / "run") == undisturbed
    said = capsys.readouterr().out
    assert said.count("nothing to do: this fit ends after update ") == FITS - 1
    assert "nothing to do: 16 of 16 updates are done" in said
    # A state saved between two earlier fits is the state of the newest update.
    made = several(tmp_path / "run")
    made.fit(rows_of(made.model, 0), steps=UPDATES)
    assert digest(made.model.state_dict().items()) != undisturbed
    made.save()
    assert digest(made.model.state_dict().items()) == undisturbed


def test_rows_that_cannot_be_made_again_are_said_and_other_rows_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, keep in (("few", 1), ("all", 5)):
        with pytest.raises(CutOff):
            script(tmp_path / name, killed_at=10, keep=keep)
    capsys.readouterr()
    script(tmp_path / "few", keep=1)
    said = capsys.readouterr().out
    assert "the model has the weights of update 10, because no checkpoint of update 8" in said
    assert "same bits: no, because the dataset has different values in" in said
    assert "since step 10" in said
    with expect_error(quorate.UserError):
        script(tmp_path / "all", rows=40)
