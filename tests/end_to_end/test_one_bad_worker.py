"""A worker that is worse off than the others: the run goes on without it, and says so."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.runs import command, run

pytestmark = pytest.mark.slow

SCRIPT = """
import sys, time, torch, quorate
from torch.utils.data import TensorDataset
from quorate.transports.processes.worker import here
worker = here()
calls = 0
def loss(model, batch):
    global calls
    calls += 1
    if worker is not None:
        time.sleep(0.02)
        if worker.number == 1 and calls > 1:  # the first is the one that it is compared by
            raise ZeroDivisionError("here alone")
    return model(batch[0]).square().mean()
torch.manual_seed(0)
trainer = quorate.Trainer(torch.nn.Linear(3, 1), loss, optimizer=torch.optim.Adam, batch_size=8,
    shards=4)
trainer.fit(TensorDataset(torch.ones(80, 3)), epochs=2)
"""


def test_one_that_raises_in_every_shard_is_named_once_and_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    ended = run(command(tmp_path / "script.py", options=("--workers", "2")))
    assert ended.code == 0, ended.said
    named = [line for line in ended.out.splitlines() if "here alone" in line]
    assert len(named) == 2, ended.said
    assert named[0].startswith("worker 1 raised ZeroDivisionError: here alone in step ")
    assert named[0].endswith("; another computes it")
    assert named[1].startswith("worker 1 raised in ")
    assert named[1].endswith(
        " shards, which others computed; the last was ZeroDivisionError: here alone: it is not as "
        "the others are"
    )
