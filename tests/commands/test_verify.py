"""quorate verify: values, and faults that are planted in real runs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.recorded_runs import SCRIPT, VERIFIED
from support.warm import WARM
from support.warm_child import child_run

from quorate.commands.main import main
from quorate.commands.verify import differences, records
from quorate.commands.verify.differences import first_difference
from quorate.commands.verify.recorder import RecordedChannel
from quorate.commands.verify.records import (
    EndRecord,
)
from quorate.commands.verify.verdict import Run, verdict
from quorate.coordination.protocol import Compute, Done, Joined, Left
from quorate.coordination.protocol import Event as ProtocolEvent
from quorate.replica.witness.values import tensor_text, value_hash
from quorate.transports.workers import Workers

LIMIT_S = 100


# --- values ---------------------------------------------------------------------------------------


def test_equal_texts_equal_bits() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    assert tensor_text(x) == tensor_text(x.t().contiguous().t())
    assert tensor_text(x) != tensor_text(x.t())
    assert tensor_text(x) != tensor_text(x + torch.tensor([0.0, 0.0, 1e-6]))
    assert tensor_text(torch.tensor(0.1)) == "float32[] 0.10000000149011612"
    assert tensor_text(x.bfloat16()).startswith("bfloat16[2, 3] ")
    assert value_hash({"x": [x, 1]}) == value_hash({"x": [x.clone(), 1]})
    assert value_hash({"x": [x, 1]}) != value_hash({"x": [x, 2]})


# --- real runs ------------------------------------------------------------------------------------


class Scripted:
    """A channel whose events are given beforehand."""

    def __init__(self, events: Sequence[ProtocolEvent | None]) -> None:
        self.events = list(events)

    def send(self, effect: object) -> None:
        pass

    def receive(self, timeout_s: float | None) -> ProtocolEvent | None:
        return self.events.pop(0)


class Nothing:
    def goes_on(self) -> None:
        pass


def test_answers_are_passed_on_when_all_have_answered() -> None:
    events = [Joined(0), Done(1, 0, 1), None, Done(2, 0, 2), Left(0, "killed", crashed=False)]
    channel: Any = RecordedChannel(Scripted(events), Nothing())  # type: ignore[arg-type]
    for worker in (0, 1, 2):
        channel.send(Compute(worker, 0, worker, "home shard", (worker, 3), None))
    found = [channel.receive(1.0) for _ in range(5)]
    # The end of a worker is news at once: nobody waits for it, and it is given no other shard.
    assert found == [Joined(0), None, events[-1], Done(1, 0, 1), Done(2, 0, 2)]
    with pytest.raises(IndexError):  # nothing is left
        channel.receive(1.0)


def recorded(folder: Path, how: str, *options: str) -> Run:
    folder.mkdir()
    words = ["run", *options, "--shards", "4", "--record", str(folder), "--record-updates", "5"]
    code, out, err = WARM.run([*words, str(SCRIPT), how], dict(os.environ), LIMIT_S)
    assert "Traceback" not in err, out + err
    return Run(options[-1], int(options[-1]), records.read(folder), code, err)


TOWERS = ("--engine", "towers", "--workers")


PROCESSES = ("--engine", "processes", "--workers")


@pytest.mark.slow
def test_recording_does_not_change_a_bit(tmp_path: Path) -> None:
    found = recorded(tmp_path / "1", "clean", *TOWERS, "2").recording
    trainer = VERIFIED.trainer("clean", workers=Workers(1, engine="towers"), shards=4)
    plain = [
        {name: tensor_text(tensor) for name, tensor in trainer.model.state_dict().items()}
        for _ in trainer.updates(VERIFIED.Rows("clean"), steps=5)
    ]
    assert [update.tensors for update in found.updates[1:]] == plain
    # Each worker takes its part in each update.
    assert [update.computed_by for update in found.updates[1:]] == [{0: 0, 1: 0, 2: 1, 3: 1}] * 5
    assert len(found.twice) == 4
    assert found.end == EndRecord(5, "")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="stages are for Linux")
def test_stages_are_compared_with_one_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both runs compute the same, and not what one piece computes."""
    monkeypatch.setenv("VERIFIED_FOLDER", str(tmp_path))
    options = ("--devices", "cpu+cpu", "--split", "noise", "--workers", "1")
    late = recorded(tmp_path / "late", "stage", *options)
    said = verdict([late, late])
    assert not said.is_same
    found = "\n".join(said.lines)
    assert "done by worker 0 on cpu+cpu (step 2, shards 0-3)" in found
    assert "another gradient of first.weight through the stages" in found
    sound = recorded(tmp_path / "sound", "clean", *options)
    said = verdict([sound, recorded(tmp_path / "whole", "clean", *TOWERS, "1")])
    assert said.is_same, said.lines
    assert "each shard computed through the stages and in one piece: same bits" in said.lines


@pytest.mark.slow
def test_a_row_that_depends_on_the_worker_is_named(tmp_path: Path) -> None:
    """The workers' data is not the coordinator's, which without a recording is refused."""
    runs = [
        recorded(tmp_path / "1", "rank", *TOWERS, "1"),
        recorded(tmp_path / "2", "rank", *PROCESSES, "2"),
    ]
    found = first_difference(runs[0].recording, runs[1].recording)
    assert found is not None
    assert (found.cause, found.row) == (differences.ROW, 17)
    assert found.workers is not None
    assert {sighting.row for sighting in found.seen} == {20}
    said = verdict(runs)
    assert not said.is_same
    assert "row 17 of the dataset has other content: what row 20 has" in said.lines[1]
    assert any(
        "computed its first shards twice with the same result" in line for line in said.lines
    )


@pytest.mark.slow
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    words = ("--workers", "1", "--updates", "2", "--engine", "towers", str(SCRIPT), "clock")
    ended = subprocess.run(  # a single number is run twice
        [sys.executable, "-m", "quorate", "verify", *words],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert (ended.returncode, ended.stderr) == (1, "")
    assert "1 worker and 1 worker again part in update 1, shard 0" in ended.stdout
    assert "verified.py:" in ended.stdout
    assert list(tmp_path.glob("quorate*")) == []


@pytest.fixture
def warm_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command's runs are processes that need not import torch."""
    monkeypatch.setattr("quorate.commands.verify.runs.child_run", child_run(lambda _: LIMIT_S))


@pytest.mark.slow
@pytest.mark.usefixtures("warm_runs")
def test_what_the_command_says(capfd: pytest.CaptureFixture[str]) -> None:
    options = (str(SCRIPT), "--engine", "towers", "--updates", "4")
    assert main(["verify", *options, "--", "clean"]) == 0
    said = capfd.readouterr().out
    assert said.startswith("3 workers: 4 updates of 3 shards\n2 workers: 4 updates of 3 shards\n")
    assert (
        "same bits on 1 worker, 2 workers, 3 workers, 3 workers stopped after update 2 and "
        "2 workers resumed after update 2, after each of 4 updates"
    ) in said
    assert "one shard computed twice on cpu: same bits" in said
    assert main(["verify", *options, "--workers", "1,2", "generator"]) == 1
    said = capfd.readouterr().out
    assert "module 'noise' (Noise) was given the same, and returned something else" in said
    assert "aten.rand.generator drew from a generator that the script made" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("missing.py",), "script: got 'missing.py'"),
        ((str(SCRIPT), "--workers", "two"), "workers: got 'two'"),
        ((str(SCRIPT), "--updates", "0"), "updates: got 0"),
        ((str(SCRIPT), "--compile", "--updates", "0"), "updates: got 0"),
    ],
)
def test_mistakes(words: Sequence[str], said: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *words]) == 2
    assert said in capfd.readouterr().err


@pytest.mark.slow
def test_a_rule_that_depends_on_timing_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "records"
    folder.mkdir()
    words = ["run", "--engine", "towers", "--workers", "2", "--update", "async"]
    code, _, err = WARM.run(
        [*words, "--record", str(folder), str(SCRIPT), "clean"], dict(os.environ), LIMIT_S
    )
    assert code == 2
    assert "verify the script with --update sync" in err


IN_A_SET = """
import torch, quorate
from torch.utils.data import TensorDataset
NAMES = {"alpha", "beta", "gamma", "delta", "epsilon"}
def loss(model, batch):
    scale = sum(len(name) * 0.1**place for place, name in enumerate(NAMES))
    return (model(batch[0]) * scale).square().mean()
trainer = quorate.Trainer(lambda: torch.nn.Linear(3, 1), loss,
    optimizer=lambda params: torch.optim.SGD(params, lr=0.01), batch_size=8, shards=2)
trainer.fit(TensorDataset(torch.ones(24, 3)), epochs=1)
"""


@pytest.mark.slow
def test_the_order_of_a_set_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    (tmp_path / "script.py").write_text(IN_A_SET)
    ways = ("--no-towers", "--no-resume", "--no-kill", "--engine", "towers", "--workers", "1,2")
    assert main(["verify", *ways, "--updates", "1", str(tmp_path / "script.py")]) == 1
    said = capfd.readouterr().out
    assert "same bits: no: PYTHONHASHSEED decides: 2 workers and 1 worker are the same" in said
