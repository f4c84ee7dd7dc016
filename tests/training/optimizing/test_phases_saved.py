"""Phases in checkpoints: a resume between two, what is shown and compared, what is forged."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.digests import digest_of
from support.forgery.forged import Forged
from support.gan import (
    LOSSES,
    OPTIMIZERS,
    adam,
    d_loss,
    dataset,
    g_loss,
    models,
    sgd,
    trainer,
)
from support.messages import expect_error
from torch import nn

import quorate
from quorate.commands.main import main
from quorate.errors import CheckpointError
from quorate.services.checkpoints.files import checkpoint_of


def noisy_g_loss(model: nn.ModuleDict, batch: list[torch.Tensor]) -> torch.Tensor:
    noise = torch.randn(len(batch[1]), 3)
    return F.softplus(-F.dropout(model["d"](model["g"](noise)), 0.2)).mean()


def test_one_digest_on_towers_and_after_a_resume_between_two_phases(tmp_path: Path) -> None:
    losses = [("d", d_loss), ("d", d_loss), ("g", noisy_g_loss)]
    found = {}
    for workers in (1, 2, 3):
        whole = trainer(losses, shards=4, devices=["cpu"] * workers)
        whole.fit(dataset(), epochs=2)
        found[workers] = digest_of(whole)
    options = {"shards": 4, "run_dir": tmp_path / "run"}
    trainer(losses, devices=["cpu"] * 3, **options).fit(dataset(), steps=10)  # a d of the second
    resumed = trainer(losses, devices=["cpu"] * 2, **options)
    resumed.fit(dataset(), epochs=2)
    assert {*found.values(), digest_of(resumed)} == {found[1]}


def test_what_is_saved_is_shown_and_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"run_dir": tmp_path / "run"}
    first = trainer(**options)
    first.fit(dataset(), steps=5)
    capsys.readouterr()
    assert main(["inspect", "--all", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr().out
    assert "d: 4 updates, SGD, clip_norm 0.2" in shown
    assert "g: 1 updates, Adam, StepLR, ema_decay 0.9" in shown
    fresh = nn.ModuleDict(models())
    quorate.load_weights(fresh, tmp_path / "run")
    for key, value in fresh.state_dict().items():
        assert torch.equal(value, first.model.state_dict()[key])
    others = [
        ({"d": d_loss, "g": g_loss}, OPTIMIZERS),
        (LOSSES, {**OPTIMIZERS, "d": adam}),
    ]
    for loss, optimizer in others:
        with expect_error(CheckpointError):
            trainer(loss, optimizer=optimizer, **options).fit(dataset(), steps=9)
    clipped = {**OPTIMIZERS, "d": quorate.Optimize(sgd, clip_norm=0.5)}
    trainer(optimizer=clipped, **options).fit(dataset(), steps=6)
    assert "clip_norm of phase d was 0.2 and is 0.5" in capsys.readouterr().out


def of_other_names(forged: Forged) -> None:
    tensors = forged.unpack("optimizer.safetensors")
    shapes = {name.replace("d/", "e/", 1): value for name, value in tensors.items()}
    forged.repack("optimizer.safetensors", shapes)


def of_the_other(forged: Forged) -> None:
    groups = [phase["optimizer_groups"] for phase in forged.record["phases"]]
    groups[0][0]["names"][0] = groups[1][0]["names"][0]


FORGERIES: dict[str, tuple[Callable[[Forged], object], str]] = {
    "no phases": (lambda f: f.record.pop("phases"), "other phases"),
    "no round": (lambda f: f.record.pop("round"), "an epoch has 6 steps"),
    "an order": (lambda f: f.record["phases"].reverse(), "other phases"),
    "one twice": (lambda f: f.record["phases"].append(f.record["phases"][0]), "other phases"),
    "a count": (lambda f: f.record["phases"][0].update(updates=3), "updates of all phases"),
    "a kind": (lambda f: f.record["phases"][0].update(optimizer="Adam"), "got optimizer="),
    "batches": (lambda f: f.record["round"].update(takes=[0, 2, 2]), "got a round that is none"),
    "no batches": (lambda f: f.record["round"].update(takes=[]), "got a round that is none"),
    "a schedule": (lambda f: f.record["phases"][1].update(schedule_state={"dict": []}), "schedule"),
    "an average": (lambda f: f.record["phases"][1].update(ema_decay=None), "ema_decay=None"),
    "a phase": (lambda f: f.record["phases"][0].update(odd=1), "unknown field"),
    "names of tensors": (of_other_names, "is of no phase"),
    "a parameter of another": (of_the_other, "which is no trainable parameter"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with checkpoints of steps 4 and 8."""
    run_dir = tmp_path_factory.mktemp("saved") / "run"
    trainer(run_dir=quorate.RunDir(run_dir, save_every_steps=4)).fit(dataset(), steps=8)
    return run_dir


@pytest.mark.parametrize("name", [*FORGERIES])
def test_a_forged_checkpoint_is_passed_over(
    name: str, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(saved, run_dir)
    forged = Forged(checkpoint_of(run_dir, 8), random.Random(0))
    change, why = FORGERIES[name]
    change(forged)
    forged.write()
    trainer(run_dir=run_dir).fit(dataset(), steps=9)
    said = capsys.readouterr().out
    (skipped,) = [s for s in said.splitlines() if s.startswith("skipped a checkpoint: ")]
    assert why in skipped
    assert "a round of updates is d, d, g, on 2 batches; an epoch has 9 updates" in said
    assert "resumed step 4 " in said
    assert main(["inspect", str(run_dir)]) == 0
