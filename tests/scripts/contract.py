"""A training with a check of the transport before the first update.

    quorate run --devices cpu --workers 2 --engine processes tests/scripts/contract.py

With the argument ``pipes``, without ``quorate run``, the script checks the engine of
``docs/maintainers/pipe_engine.py``.

Prints the tried clauses of the contract, as a line of JSON. Shard 0 of step 3 holds a row
that cannot be loaded; the training itself is given up.
"""

import json
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

import quorate
from quorate.engines import Channel, Transport, WrappedTransport
from quorate.engines.job import Job, Training
from quorate.testing import check_engine
from quorate.training.observer import observing
from quorate.training.state import State


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, row: int) -> torch.Tensor:
        if row == 24:
            raise ValueError("row 24")
        return torch.full((4,), float(row))


class Checked(WrappedTransport):
    def open(self, job: Job) -> Channel:
        def kill(worker: int) -> None:
            pid = self.status()[worker].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)

        assert isinstance(job, Training)
        clauses = check_engine(self._inner, job, fails=(3, 0), kill=kill, limit_s=240.0)
        print(json.dumps(clauses))
        raise SystemExit(0)


def check(transport: Transport, state: State, facts: Mapping[str, Any]) -> Transport:
    return Checked(transport)


def loss(model: Any, rows: torch.Tensor) -> torch.Tensor:
    return model(rows).square().mean()


through_pipes = sys.argv[1:] == ["pipes"]
trainer = quorate.Trainer(
    nn.Linear(4, 2),
    loss,
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    batch_size=8,
    shards=4,
    devices="cpu" if through_pipes else None,
    workers=quorate.Workers(2, engine="towers") if through_pipes else None,
)
with ExitStack() as stack:
    if through_pipes:
        sys.path.append(str(Path(__file__).parents[2] / "docs" / "maintainers"))
        from pipe_engine import PipeEngine

        stack.enter_context(observing(PipeEngine))
    stack.enter_context(observing(check))
    trainer.fit(Rows(), steps=4, shuffle=False)
