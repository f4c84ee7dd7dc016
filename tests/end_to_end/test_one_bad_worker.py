"""A worker that is worse off than the others: the run goes on without it, and says so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.memory_group import inside, memory_group
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
    assert named[0].endswith("; another worker computes it")
    assert named[1].startswith("worker 1 raised in ")
    assert named[1].endswith(
        " shards of training, which other workers computed; the last error was "
        "ZeroDivisionError: here alone; look for what is different on worker 1"
    )


HUNGRY = """
import torch, quorate
from torch.utils.data import TensorDataset
from quorate.transports.processes.worker import here
kept = []
def loss(model, batch):
    if here() is not None and model.training:
        for _ in range(400):
            kept.append(torch.ones(10 << 20, dtype=torch.uint8))
    return model(batch[0]).square().mean()
torch.manual_seed(0)
trainer = quorate.Trainer(torch.nn.Linear(3, 1), loss, optimizer=torch.optim.Adam, batch_size=8,
    shards=4)
trainer.fit(TensorDataset(torch.ones(80, 3)), epochs=2)
"""


def test_workers_that_are_always_out_of_memory_are_given_up_soon(
    tmp_path: Path,
) -> None:
    (tmp_path / "script.py").write_text(HUNGRY)
    words = command(tmp_path / "script.py", options=("--workers", "2"))
    with memory_group(2 << 30) as group:
        ended = run(inside(group, words))
    assert ended.code == 1, ended.said
    last = ended.err.splitlines()
    assert any("no worker is left" in line for line in last), ended.said
    assert sum("because memory ran out (use fewer workers" in line for line in last) >= 1, (
        ended.said
    )
    assert ended.said.count("; another is starting") <= 2 * 3


AHEAD = """
import ctypes, time, torch, quorate
from torch.utils.data import Dataset
class Rows(Dataset):
    def __len__(self):
        return 80
    def __getitem__(self, row):
        if row == 71:  # of step 8, shard 3
            ctypes.string_at(0)
        time.sleep(0.001)  # else rows are loaded when they are wanted
        return torch.ones(3)
def loss(model, batch):
    time.sleep(0.3)
    return model(batch).square().mean()
trainer = quorate.Trainer(torch.nn.Linear(3, 1), loss, optimizer=torch.optim.Adam, batch_size=8,
    shards=4)
trainer.fit(Rows(), epochs=1, shuffle=False)
"""


def test_a_crash_over_rows_that_are_loaded_ahead_names_them(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(AHEAD)
    ended = run(
        command(tmp_path / "script.py", options=("--workers", "1", "--engine", "processes"))
    )
    assert ended.code == 1, ended.said
    last = ended.err.splitlines()[-1]
    assert "was killed by signal 11 (SIGSEGV)" in last
    assert re.search(r"it computed step [67], shard ", last)
    said = (
        ", and loaded rows [70, 71] of step 8, shard 3 ahead: the one or the other may be to blame"
    )
    assert last.endswith(said), last


def test_a_crash_over_rows_that_are_cheap_names_their_shard(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(AHEAD.replace("time.sleep(0.001)", "pass"))
    ended = run(
        command(tmp_path / "script.py", options=("--workers", "1", "--engine", "processes"))
    )
    assert ended.code == 1, ended.said
    last = ended.err.splitlines()[-1]
    assert "was killed by signal 11 (SIGSEGV) in step 8, shard 3, fetching" in last
    assert last.endswith("it computed step 8, shard 3, rows [70, 71]"), last
