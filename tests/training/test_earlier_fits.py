"""A script with several fits, started again: earlier fits are not made again, and that is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.digests import digest
from support.messages import expect_error
from torch import nn
from torch.utils.data import TensorDataset

import quorate

FITS, UPDATES = 4, 4


class CutOff(Exception):  # noqa: N818
    """Ends a script as a kill would, with a checkpoint of the update before."""


class Kill(quorate.Callback):
    def __init__(self, at: int | None) -> None:
        self._at = at

    def updated(self, report: quorate.Report) -> None:
        if report.global_step == self._at:
            raise CutOff


def rollouts(model: nn.Module, number: int, rows: int = 32) -> TensorDataset:
    """Rows that follow from the model: the actions of a policy, and a reward."""
    x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(number))
    with torch.no_grad():
        logits = model(x).log_softmax(1)
    return TensorDataset(x, logits.argmax(1), (x.sum(1) > 0).float(), logits)


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    x, actions, reward, old = batch
    ratio = (model(x).log_softmax(1) - old).exp().gather(1, actions[:, None])[:, 0]
    return -(ratio.clamp(0.8, 1.2) * reward).mean()


def script(run_dir: Path, *, killed_at: int | None = None, keep: int = 5, **rows: int) -> str:
    """Train as a script of policy gradients does; return the digest at its end."""
    torch.manual_seed(0)
    trainer = quorate.Trainer(
        nn.Linear(4, 3),
        loss,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.1),
        batch_size=8,
        shards=2,
        devices="cpu",
        workers=1,
        run_dir=quorate.RunDir(run_dir, keep=keep, summary_every_s=None),
    )
    for number in range(FITS):
        data = rollouts(trainer.model, number, **rows)
        trainer.fit(data, steps=(number + 1) * UPDATES, callbacks=[Kill(killed_at)])
    return digest(trainer.model.state_dict().items())


@pytest.mark.parametrize("killed_at", [2, 4, 6, 8, 11, 13])
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


def test_rows_that_cannot_be_made_again_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CutOff):
        script(tmp_path, killed_at=10, keep=1)
    capsys.readouterr()
    script(tmp_path, keep=1)
    said = capsys.readouterr().out
    assert "the model has the weights of update 10, because no checkpoint of update 8" in said
    assert "same bits: no, because the dataset has different values in" in said
    assert "since step 10" in said


def test_a_fit_that_was_cut_off_is_not_gone_on_with_other_rows(tmp_path: Path) -> None:
    with pytest.raises(CutOff):
        script(tmp_path, killed_at=10)
    with expect_error(quorate.UserError):
        script(tmp_path, rows=40)


def test_a_script_that_is_done_is_done_when_it_is_started_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = script(tmp_path)
    capsys.readouterr()
    assert script(tmp_path) == done
    said = capsys.readouterr().out
    assert said.count("nothing to do: this fit ends after update ") == FITS - 1
    assert "nothing to do: 16 of 16 updates are done" in said


def test_a_state_saved_between_two_earlier_fits_is_that_of_the_newest_update(
    tmp_path: Path,
) -> None:
    done = script(tmp_path)
    torch.manual_seed(0)
    trainer = quorate.Trainer(
        nn.Linear(4, 3),
        loss,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.1),
        batch_size=8,
        shards=2,
        devices="cpu",
        workers=1,
        run_dir=tmp_path,
    )
    trainer.fit(rollouts(trainer.model, 0), steps=UPDATES)
    assert digest(trainer.model.state_dict().items()) != done
    trainer.save()
    assert digest(trainer.model.state_dict().items()) == done


class Losses(quorate.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def updated(self, report: quorate.Report) -> None:
        self.losses.append(report.metrics["loss"])


class KeptLosses(Losses):
    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = state["losses"]


def test_callbacks_that_hear_of_no_update_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trial of a sweep that is finished: what a callback kept comes back by its state_dict."""
    for _ in range(2):
        capsys.readouterr()
        forgets, keeps = Losses(), KeptLosses()
        trainer = quorate.Trainer(
            lambda: nn.Linear(4, 3),
            loss,
            optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.1),
            batch_size=8,
            shards=2,
            devices="cpu",
            workers=1,
            run_dir=tmp_path,
        )
        trainer.fit(rollouts(nn.Linear(4, 3), 0), steps=3, callbacks=[forgets, keeps])
    assert forgets.losses == []
    assert len(keeps.losses) == 3
    said = capsys.readouterr().out
    assert "callbacks that receive no update, because an earlier run made all" in said
    assert "updates of this fit: Losses;" in said
