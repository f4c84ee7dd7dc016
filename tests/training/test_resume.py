"""Saving, resuming and stopping: the state is whole, or it is not loaded."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.digests import digest_of
from support.messages import expect_error
from support.runs import wait_for
from support.small import DATA, Small, loss, trainer
from torch import nn

import quorate
from quorate.coordination.plan import Plan
from quorate.errors import CheckpointError
from quorate.replica.digest import digest
from quorate.services.checkpoints import files


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
        lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True),
        lambda params: torch.optim.Adafactor(params, lr=0.01),
    ],
)
def test_a_resume_in_the_middle_of_an_epoch_on_other_workers(
    tmp_path: Path, optimizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = trainer(None, workers=1, optimizer=optimizer)
    whole.fit(DATA, steps=23)
    trainer(tmp_path, workers=3, optimizer=optimizer).fit(DATA, steps=9)
    resumed = trainer(tmp_path, workers=2, optimizer=optimizer)
    resumed.fit(DATA, steps=23)
    assert "resumed step 9 (epoch 2, 80%) from" in capsys.readouterr().out
    assert digest_of(resumed) == digest_of(whole)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["global_step"] for line in lines] == list(range(1, 24))


def test_a_loop_that_is_left_goes_on_where_it_was() -> None:
    whole, parts = trainer(None), trainer(None)
    for _ in whole.updates(DATA, steps=14):
        pass
    for report in parts.updates(DATA, steps=14):
        if report.global_step == 6:
            break
    for _ in parts.updates(DATA, steps=14):
        pass
    assert digest_of(parts) == digest_of(whole)


def test_what_is_saved_loads_into_plain_torch(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    run.fit(DATA, epochs=1)
    found = files.find(tmp_path)
    assert found is not None
    plain, averaged = Small(), Small()
    plain.load_state_dict(load_file(found.path / "model.safetensors"))
    averaged.load_state_dict(load_file(found.path / "averaged.safetensors"))
    assert digest(plain.state_dict().items()) == digest(run.model.state_dict().items())
    assert digest_of(run) == digest([*plain.state_dict().items(), *averaged.state_dict().items()])


def test_a_finished_run_has_nothing_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = trainer(tmp_path)
    first.fit(DATA, epochs=1)
    second = trainer(tmp_path)
    second.fit(DATA, epochs=1)
    assert "nothing to do: 5 of 5 updates are done" in capsys.readouterr().out
    assert digest_of(first) == digest_of(second)


def test_shards_of_the_first_run_are_the_default_of_later_ones(tmp_path: Path) -> None:
    trainer(tmp_path, workers=3, shards=None).fit(DATA, steps=2)
    second = trainer(tmp_path, workers=2, shards=None)
    second.fit(DATA, steps=5)
    whole = trainer(None, workers=1, shards=3)
    whole.fit(DATA, steps=5)
    assert digest_of(second) == digest_of(whole)


@pytest.mark.parametrize("changed", [{"seed": 1}, {"shards": 3}, {"batch_size": 13}], ids=str)
def test_what_does_not_fit_is_named(tmp_path: Path, changed: dict[str, int]) -> None:
    trainer(tmp_path).fit(DATA, steps=2)
    with expect_error(CheckpointError):
        trainer(tmp_path, **changed).fit(DATA, steps=4)
    with expect_error(CheckpointError):
        trainer(tmp_path).fit(torch.utils.data.Subset(DATA, range(55)), steps=4)


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    trainer(tmp_path).fit(DATA, steps=2)
    with expect_error(CheckpointError):
        trainer(tmp_path, optimizer=torch.optim.Adafactor).fit(DATA, steps=4)


def test_another_model_is_refused_by_key_with_both_shapes(tmp_path: Path) -> None:
    trainer(tmp_path).fit(DATA, steps=2)

    class Wider(Small):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Linear(3, 2)

    other = quorate.Trainer(
        Wider,
        loss,
        optimizer=torch.optim.AdamW,
        run_dir=tmp_path,
        batch_size=12,
        shards=4,
        devices="cpu",
    )
    with expect_error(CheckpointError):
        other.fit(DATA, steps=4)


def test_damage_is_noticed_and_the_checkpoint_before_it_is_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for steps in (2, 4):
        trainer(tmp_path).fit(DATA, steps=steps)
    newest = max((tmp_path / "checkpoints").iterdir())
    for name in ("model", "averaged", "optimizer"):
        copy = tmp_path / f"copy-{name}"
        shutil.copytree(tmp_path / "checkpoints", copy / "checkpoints")
        file = copy / "checkpoints" / newest.name / f"{name}.safetensors"
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(bytes(data))
        found = files.find(copy)
        assert found is not None
        assert found.record["global_step"] == 2
    trainer(copy).fit(DATA, steps=4)
    assert f"skipped a checkpoint: {file}: " in capsys.readouterr().out
    assert not list((copy / "checkpoints").glob(".*"))
    repaired = files.find(copy)
    assert repaired is not None
    assert (repaired.record["global_step"], repaired.passed_over) == (4, [])
    for path in (tmp_path / "checkpoints").iterdir():
        (path / "state.json").write_text("{")
    with expect_error(CheckpointError):
        files.find(tmp_path)


def test_a_save_that_fails_leaves_the_older_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trainer(tmp_path)
    run.fit(DATA, steps=2)
    before = sorted((tmp_path / "checkpoints").rglob("*"))

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    for _ in run.updates(DATA, steps=4):
        pass
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        run.save()
    assert sorted((tmp_path / "checkpoints").rglob("*")) == before


def test_an_exception_of_the_user_leaves_the_state_of_the_last_update(tmp_path: Path) -> None:
    rows = Plan(rows=len(DATA), batch_size=12, shards=4).batch(3).tolist()
    late = {tuple(DATA[row][0].tolist()) for row in rows}

    def failing(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        if tuple(batch[0][0].tolist()) in late:
            raise ZeroDivisionError("the user's")
        return loss(model, batch)

    run = quorate.Trainer(
        Small,
        failing,
        optimizer=torch.optim.AdamW,
        batch_size=12,
        shards=4,
        devices="cpu",
        workers=2,
        run_dir=tmp_path,
    )
    with pytest.raises(ZeroDivisionError, match="the user's") as caught:
        run.fit(DATA, epochs=5)
    assert "shard" in caught.value.__notes__[0]
    assert "step 3" in caught.value.__notes__[0]
    found = files.find(tmp_path)
    assert found is not None
    assert found.record["global_step"] == run.global_step == 3


SLOW = """
import sys, time, torch, quorate
from torch.utils.data import TensorDataset
def loss(model, batch):
    time.sleep(0.02)
    return model(batch[0]).square().mean()
torch.manual_seed(0)
trainer = quorate.Trainer(torch.nn.Linear(3, 1), loss, optimizer=torch.optim.Adam, batch_size=8,
    shards=4, devices="cpu", workers=quorate.Workers(2, engine="towers"), run_dir=sys.argv[1])
trainer.fit(TensorDataset(torch.ones(800, 3)), epochs=2)
print("after fit")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "codes"),
    [
        # 1: Python forgets that it was a Ctrl-C if code runs at the exit for the first time, as
        # torch's does that prints compile times where tabulate is installed.
        (signal.SIGINT, (-signal.SIGINT, 1)),
        (signal.SIGTERM, (143,)),
    ],
)
def test_a_signal_ends_the_step_and_saves(
    tmp_path: Path, number: signal.Signals, codes: tuple[int, ...]
) -> None:
    script = tmp_path / "slow.py"
    script.write_text(SLOW)
    command = [sys.executable, str(script), str(tmp_path / "run")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, stderr=subprocess.PIPE
    ) as run:
        wait_for(run, "step")
        time.sleep(0.3)
        run.send_signal(number)
        out, _ = run.communicate(timeout=60)
    assert run.returncode in codes
    assert f": {number.name}\n" in out
    assert "saved step" in out
    assert "after fit" not in out
    found = files.find(tmp_path / "run")
    assert found is not None
    assert 0 < found.record["global_step"] < 200


def test_stop_ends_the_loop_after_the_step_under_way() -> None:
    run = trainer(None)
    for report in run.updates(DATA, steps=50):
        if report.global_step == 3:
            run.stop()
    assert run.global_step in (3, 4)


class Scalars(nn.Module):
    """Parameters without dimensions, the first one included."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.linear = nn.Linear(6, 1)
        self.shift = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale + self.shift


@pytest.mark.parametrize(
    "kind", ["SGD", "Adam", "Adagrad", "RMSprop", "NAdam", "RAdam", "ASGD", "Rprop", "Adamax"]
)
def test_parameters_without_dimensions_resume(tmp_path: Path, kind: str) -> None:
    def run(run_dir: Path | None, steps: int) -> str:
        def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
            options = {"momentum": 0.9} if kind in ("SGD", "RMSprop") else {}
            groups = [{"params": params[:1]}, {"params": params[1:]}]
            optimizer: torch.optim.Optimizer = getattr(torch.optim, kind)(
                groups, lr=0.01, **options
            )
            return optimizer

        torch.manual_seed(0)
        one = quorate.Trainer(
            Scalars(),
            loss,
            optimizer=make,
            batch_size=12,
            shards=4,
            devices="cpu",
            run_dir=run_dir,
        )
        one.fit(DATA, steps=steps)
        return digest(one.model.state_dict().items())

    run(tmp_path, 4)
    assert run(tmp_path, 9) == run(None, 9)


def test_a_resume_with_other_groups_takes_what_state_there_is(tmp_path: Path) -> None:
    def two_groups(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        groups = [{"params": params[:2], "momentum": 0.0}, {"params": params[2:]}]
        return torch.optim.SGD(groups, lr=0.01, momentum=0.9)

    def one_group(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.01, momentum=0.9)

    trainer(tmp_path, optimizer=two_groups, schedule=None).fit(DATA, steps=2)
    trainer(tmp_path, optimizer=one_group, schedule=None).fit(DATA, steps=4)
    found = files.find(tmp_path)
    assert found is not None
    assert found.record["global_step"] == 4


def test_sound_checkpoints_stay_when_newer_ones_are_damaged(tmp_path: Path) -> None:
    trainer(tmp_path).fit(DATA, steps=2)
    for step in range(10, 16):
        damaged = tmp_path / "checkpoints" / f"step-{step:012d}"
        damaged.mkdir()
        (damaged / "state.json").write_text("{")
    trainer(tmp_path).fit(DATA, steps=4)
    found = files.find(tmp_path)
    assert found is not None
    assert found.record["global_step"] == 4


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
    assert files.find(tmp_path) is None
    with expect_error(quorate.UserError):
        run.save()
    with expect_error(quorate.UserError):
        run.fit(DATA, epochs=2)


def test_evaluating_a_run_directory_uses_what_is_saved_there(tmp_path: Path) -> None:
    first = trainer(tmp_path)
    first.fit(DATA, epochs=2)
    second = trainer(tmp_path)
    assert second.evaluate(DATA) == first.evaluate(DATA)
    second.fit(DATA, epochs=3)
    whole = trainer(None)
    whole.fit(DATA, epochs=3)
    assert digest_of(second) == digest_of(whole)
