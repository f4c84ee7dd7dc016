"""A training whose checkpoints all ranks write, however small it is; and mischief meanwhile.

    quorate run --engine collective --workers 3 tests/scripts/saved_by_ranks.py

The arguments: what happens ("nothing", "KILL", "full", "deny", "more"), when ("hash:5": before a
rank reads a fifth file for its checksum; writes are those of the second save), to which rank; and
which ranks do not see the run directory, "12" say. It happens once.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import quorate
from quorate.replica.digest import digest
from quorate.services.checkpoints import draft, tensor_file
from quorate.training.collective import filling, rows, saves
from quorate.training.optimizing import sliced_optimizer
from quorate.transports.collective.place import own_place

WHAT, MOMENT, TARGET, BLIND, *_ = [*sys.argv[1:], "nothing", "", "0", ""][:4]
ROWS, BATCH, SHARDS, STEPS, SAVED_AT = 48, 12, 4, 6, 4
OPTIMIZER = os.environ.get("OPTIMIZER", "adam")
place = own_place()
RANK = 0 if place is None else place.rank
HAPPENED = Path(os.environ["HAPPENED"]) if "HAPPENED" in os.environ else None

if os.environ.get("GATHERED") is None:
    rows.GATHERED_BYTES = 0
counts: dict[str, int] = {}


def here(moment: str) -> None:
    """Let it happen, if this is the moment."""
    counts[moment] = counts.get(moment, 0) + 1
    at = int(MOMENT.partition(":")[2] or 1)
    is_now = counts[moment] == at and moment == MOMENT.partition(":")[0]
    if not is_now or int(TARGET) != RANK or HAPPENED is None or HAPPENED.exists():
        return
    HAPPENED.write_text(moment)
    if WHAT == "KILL":
        os.kill(os.getpid(), signal.SIGKILL)
    if WHAT == "full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


write_at, sha256, fill = filling.write_at, tensor_file.sha256, saves.fill
flush, atomically, signed = filling.File.flush, draft.write_atomically, saves._signed


def heard(self: saves.Saves, record: Any) -> None:
    here(record["kind"])
    hear(self, record)


def filled(*words: Any) -> Any:
    counts["saves"] = counts.get("saves", 0) + 1
    return fill(*words)


def written(*words: Any) -> None:
    write_at(*words)
    if counts["saves"] == 2:
        here("write")


def hashed(path: Path) -> str:
    here("hash")
    return sha256(path)


def flushed(self: filling.File) -> None:
    try:
        here("flush")
    except OSError as error:
        self.error = error
    flush(self)


def put(path: Path, *words: Any) -> None:
    here(path.name)
    atomically(path, *words)


def signed_or_not(path: Path, token: bytes, rank: int) -> str:
    if str(rank) in BLIND:
        return f"rank {rank} does not see it"
    if WHAT != "deny" or rank != int(TARGET):
        return signed(path, token, rank)
    os.seteuid(65534)  # a user who may do nothing there
    try:
        return signed(path, token, rank)
    finally:
        os.seteuid(0)


hear = saves.Saves.hear
saves.Saves.hear = heard  # type: ignore[method-assign]
filling.write_at, saves.fill = written, filled
tensor_file.sha256 = hashed
filling.File.flush = flushed  # type: ignore[method-assign]
draft.write_atomically = put  # type: ignore[assignment]
saves._signed = signed_or_not
sees = sliced_optimizer.sees
sliced_optimizer.sees = lambda *words: str(RANK) not in BLIND and sees(*words)


class Net(nn.Module):
    """Parameters by rows and not, of two dtypes, tiny and larger than a slice, one not used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.convolution = nn.Conv2d(3, 700, 5)
        self.convolution.weight.data = self.convolution.weight.data.to(
            memory_format=torch.channels_last
        )
        self.norm = nn.BatchNorm1d(700)
        self.wide = nn.Linear(700, 400)
        self.unused = nn.Linear(400, 300)
        self.precise = nn.Linear(400, 300).double()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.last = nn.Linear(300, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.norm(self.convolution(x).flatten(1))
        inner = F.relu(self.wide(F.dropout(inner, 0.2, self.training))) * self.scale
        return self.last(self.precise(inner.double()).float())


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    x, labels = batch
    return F.cross_entropy(model(x), labels)


MAKE = {
    "adam": lambda params: torch.optim.Adam(params, lr=1e-3, amsgrad=True),
    "sgd": lambda params: torch.optim.SGD(
        [{"params": params[:3], "lr": 0.05}, {"params": params[3:]}], lr=0.1, momentum=0.9
    ),
}


class Said(quorate.Callback):
    def saved(self, global_step: int, path: Path) -> None:
        print("saved", global_step, path.name, flush=True)


if __name__ == "__main__":
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.randn(ROWS, 3, 5, 5, generator=generator),
        torch.randint(0, 3, (ROWS,), generator=generator),
    )
    trainer = quorate.Trainer(
        Net,
        loss,
        optimizer=quorate.Optimize(
            MAKE[OPTIMIZER],
            ema_decay=0.9,
            schedule=lambda opt: torch.optim.lr_scheduler.StepLR(opt, 3),
        ),
        batch_size=BATCH,
        shards=SHARDS,
        devices="cpu",
        run_dir=quorate.RunDir("unnamed", save_every_steps=2, keep=9),
    )
    trainer.fit(data, steps=STEPS, callbacks=[Said()])
    if WHAT == "more":  # of a run that was over: the ranks have ended, and rank 0 has all of it
        print("saved", trainer.save(), flush=True)
        trainer.fit(data, steps=STEPS + 2)
    print("digest", digest(trainer.model.state_dict().items()), flush=True)
