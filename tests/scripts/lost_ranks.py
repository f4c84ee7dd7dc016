"""A training for ranks of a collective, one of which comes to grief.

    quorate run --engine collective --workers 3 tests/scripts/lost_ranks.py STOP forward 1 3

The arguments: what happens (a signal, hang, exit, memory, hungry, raise, slow, or nothing), in
which phase, to which rank, in which step, the run directory, and a folder for the pids of ranks. It
happens in the first start of ranks alone.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import quorate
from quorate.replica.digest import digest
from quorate.services.checkpoints.saver import Checkpoints
from quorate.transports.collective.place import own_place
from quorate.transports.collective.ranks import Ranks

kept: list[bytes] = []
happened: list[str] = []
WHAT, PHASE, TARGET, STEP, *rest = sys.argv[1:]
RUN_DIR = rest[0] if rest else None
PIDS = Path(rest[1]) if rest[1:] else None  # folder
ROWS, BATCH, SHARDS, STEPS = 96, 24, 4, int(os.environ.get("STEPS", "8"))
PAUSE_S = float(os.environ.get("PAUSE_S", "0"))  # of each shard
place = own_place()
RANK = 0 if place is None else place.rank
IS_FIRST = place is None or place.attempt == "0"
Ranks.now = 0  # type: ignore[attr-defined]  # the step that this rank is at


def here(phase: str, *, by_first: bool = False, or_later: bool = False) -> None:
    """Let it happen, if this is where it is to.

    Args:
        or_later: whether in later steps too: rows are fetched ahead, and a fetch that failed is
            tried once more.
        by_first: whether rank 0 alone comes here, and does it to whomever it is to happen to.
    """
    is_now = Ranks.now >= int(STEP) if or_later else Ranks.now == int(STEP)
    if not IS_FIRST or phase != PHASE or not is_now:
        return
    if by_first and PIDS is not None:
        pid = int((PIDS / TARGET).read_text())
    elif int(TARGET) == RANK:
        pid = os.getpid()
    else:
        return
    if happened and not or_later:
        return
    happened.append(phase)
    if PIDS is not None:
        (PIDS / "happened").write_text(str(time.time()))
    match WHAT:
        case "hang":
            time.sleep(1e6)
        case "exit":
            sys.exit(0)
        case "memory":
            raise MemoryError("no room for a tensor")
        case "raise":
            raise ValueError("mine")
        case "hungry":
            kept.extend(b"x" * (16 << 20) for _ in range(1000))
        case "nothing":
            pass
        case name:
            os.kill(pid, getattr(signal, f"SIG{name}"))


class Rows(Dataset[tuple[torch.Tensor, int, int]]):
    """Rows that say their number: in the order of the rows a row's step follows from it."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int, int]:
        here("fetching", or_later=True)
        x = torch.randn(6, generator=torch.Generator().manual_seed(row))
        return x, row % 3, row


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 300), nn.Linear(300, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.dropout(F.relu(self.first(x)), 0.3, self.training))


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(_context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_context: Any, gradient: torch.Tensor) -> torch.Tensor:
        here("backward")
        return gradient


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    x, labels, _ = batch
    if not model.training:
        here("evaluation", by_first=True)
        return F.cross_entropy(model(x), labels)
    here("forward")
    time.sleep(PAUSE_S * (4 if WHAT == "slow" and int(TARGET) == RANK else 1))
    return F.cross_entropy(Backward.apply(model(x)), labels)


class Update(torch.optim.Adam):
    def step(self, closure: Any = None) -> Any:
        here("update")
        return super().step(closure)


hear, tell, gather = Ranks.hear, Ranks.tell, Ranks.gather
write = Checkpoints.write


def heard(self: Ranks) -> Any:
    record = hear(self)
    Ranks.now = record.get("step", Ranks.now)  # type: ignore[attr-defined]
    return record


def told(self: Ranks, record: Any) -> None:
    Ranks.now = record.get("step", Ranks.now)  # type: ignore[attr-defined]
    tell(self, record)


def gathered(self: Ranks, own: bytes, **how: Any) -> list[bytes]:
    here("exchange")
    return gather(self, own, **how)


def written(self: Checkpoints, contents: Any) -> Path:
    here("saving", by_first=True)
    return write(self, contents)


Ranks.hear, Ranks.tell, Ranks.gather = heard, told, gathered  # type: ignore[method-assign]
Checkpoints.write = written  # type: ignore[method-assign]


class Saves(quorate.Callback):
    """Saves in the foreground, so that a rank can come to grief meanwhile; shows who is there."""

    def started(self, run: Any) -> None:
        self.run = run

    def updated(self, report: Any) -> None:
        if report.global_step == 3 and PHASE == "saving":
            self.run.save()
        if WHAT == "slow" and report.global_step == STEPS - 1:
            for each in self.run.workers:
                print(
                    "status", each.number, each.pid, each.phase, each.step, each.shards, flush=True
                )


if __name__ == "__main__":
    if PIDS is not None:
        (PIDS / str(RANK)).write_text(str(os.getpid()))
    here("start")
    trainer = quorate.Trainer(
        Net,
        loss,
        optimizer=lambda params: Update(params, lr=1e-2),
        batch_size=BATCH,
        shards=SHARDS,
        devices="cpu",
        run_dir=None if RUN_DIR is None else quorate.RunDir(RUN_DIR, save_every_steps=2),
    )
    here("meeting")
    trainer.fit(
        Rows(),
        steps=STEPS,
        shuffle=False,
        validation=quorate.Validation(Rows(), every_steps=max(2, STEPS // 40)),
        callbacks=[Saves()] if WHAT == "slow" or PHASE == "saving" else [],
    )
    print("digest", digest(trainer.model.state_dict().items()), flush=True)
