"""Stages in a trace: a row for each with what it did of every shard, beside the other stages."""

from __future__ import annotations

import os
import select
from itertools import count
from multiprocessing import current_process
from pathlib import Path

import pytest
import torch
from support import traces
from support.runs import command, run
from torch import nn
from torch.utils.data import TensorDataset

import quorate

SHARDS, UPDATES = 4, 2
ROWS = TensorDataset(torch.randn(8 * UPDATES, 6), torch.randn(8 * UPDATES, 1))


class Meets(nn.Module):
    """In the process of a stage, one of its calls goes on when one of the other stage's has begun.

    Args:
        name: of the process.
        call: of this module there, from 0.
        tells: descriptor that is written when the call begins.
        hears: descriptor that is read then.
    """

    def __init__(self, name: str, call: int, tells: int, hears: int) -> None:
        super().__init__()
        self._meeting = name, call, tells, hears
        self._calls = count()

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        name, call, tells, hears = self._meeting
        if current_process().name == name and next(self._calls) == call:
            os.write(tells, b".")
            assert select.select([hears], [], [], 120)[0], "the other stage did not begin"
        return values * 1


class Chain(nn.Module):
    """Two layers: the first stage's shard 1 and the last stage's shard 0 wait for each other.

    Those of the second update: in the first one shards come one by one, until it is known how long
    they take.
    """

    def __init__(self, ends: list[int]) -> None:
        super().__init__()
        to_first, from_last, to_last, from_first = ends
        self.first = nn.Linear(6, 6)
        self.early = Meets("quorate-stage-0", SHARDS + 1, from_first, to_first)
        self.last = nn.Linear(6, 1)
        self.late = Meets("quorate-stage-1", SHARDS, from_last, to_last)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.late(self.last(self.early(self.first(values))))
        return result


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def require_rows(written: traces.Written, steps: int, shards: int) -> None:
    """See that each of two stages has a row with both works of all shards."""
    everything = {(step, shard) for step in range(steps) for shard in range(shards)}
    for stage in range(2):
        row = next(key for key, name in written.names.items() if name.endswith(f": stage {stage}"))
        for work in ("forward", "backward"):
            spans = [s for s in written.of("training", work) if (s.process, s.thread) == row]
            assert sorted((s.step, s.shard) for s in spans) == sorted(everything)


def test_stages_compute_at_the_same_time(tmp_path: Path) -> None:
    file, ends = tmp_path / "trace.json", [*os.pipe(), *os.pipe()]
    try:
        trainer = quorate.Trainer(
            Chain(ends),
            loss,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
            batch_size=8,
            shards=SHARDS,
            devices="cpu+cpu",
            workers=quorate.Workers(1, engine="towers"),
            # A spot check goes through the stages too, and would count among the calls.
            compute=quorate.Compute(split=["last"], spot_check_every=0),
            run_dir=quorate.RunDir(trace=file),
        )
        trainer.fit(ROWS, epochs=1)
    finally:
        for end in ends:
            os.close(end)
    written = traces.read(file)
    require_rows(written, UPDATES, SHARDS)
    names = {name for name in written.names.values() if "stage" in name}
    assert names == {"worker 0: stage 0", "worker 0: stage 1"}

    def forward(stage: int, shard: int) -> traces.Span:
        return next(
            span
            for span in written.of("training", "forward")
            if written.names[span.process, span.thread].endswith(f"stage {stage}")
            and (span.step, span.shard) == (1, shard)
        )

    one, other = forward(0, shard=1), forward(1, shard=0)
    assert one.begin < other.end
    assert other.begin < one.end
    # What a stage waits for is no work of it: it begins when the one before is done with the shard.
    for shard in range(SHARDS):
        assert forward(0, shard).begin <= forward(1, shard).begin


@pytest.mark.slow
def test_of_worker_processes(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    stages = ("--devices", "cpu+cpu", "--split", "embedding", "--workers", "2")
    script = command("in_stages.py", "none", str(tmp_path), options=(*stages, "--trace", str(file)))
    ended = run(script)
    assert ended.code == 0, ended.said
    written = traces.read(file)
    rows = {name for name in written.names.values() if "stage" in name}
    assert rows == {f"worker {n}: stage {stage}" for n in range(2) for stage in range(2)}
    computed = {(s.step, s.shard) for s in written.of("training", "backward")}
    for stage in range(2):
        of_stage = {
            (span.step, span.shard)
            for span in written.of("training", "backward")
            if written.names[span.process, span.thread].endswith(f"stage {stage}")
        }
        assert of_stage == computed
