"""Trains with a loss over the whole batch, InfoNCE; prints the digest.

    quorate run tests/scripts/gathered.py ENGINE WORKERS [RUN_DIR STEPS [FOLDER PASS]]

With a folder, each worker is killed once, at the end of its 4th shard of this pass: 1, in which
shards are represented, or 2, in which gradients go back through them. In the place of the pass,
"represent" and "contrast" raise there in the third step, and "inf" makes no update of every third.
"""

from __future__ import annotations

import math
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
from quorate.training.whole_batch.jobs import BackThrough, Representing
from quorate.transports.job import Training
from quorate.transports.processes.worker import here

# Of an epoch's three batches the last has 10 rows; in shards of 2, 3 or 4 rows.
ROWS, BATCH, SHARDS, STEPS = 46, 18, 5, 9
mischief = ""


class Encoder(nn.Module):
    """Two views to unit vectors; the temperature is learnt, and the loss alone uses it."""

    def __init__(self, dropout: float = 0.2, norm: type[nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(
            nn.Linear(6, 16), norm(16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 4)
        )
        self.log_temperature = nn.Parameter(torch.tensor(-0.5))


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, 6, generator=generator)
    return TensorDataset(x, x + 0.1 * torch.randn(ROWS, 6, generator=generator))


def represent(model: nn.Module, batch: Any) -> tuple[torch.Tensor, ...]:
    if mischief == "represent" and model.training and len(batch[0]) == 2:
        raise ValueError("mine")  # the shards of the third step have 2 rows
    return tuple(F.normalize(model.body(view), dim=1) for view in batch)


def contrast(model: nn.Module, views: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    one, other = views
    if mischief == "contrast" and model.training and len(one) == ROWS % BATCH:
        raise ValueError("mine")
    logits = one @ other.T / model.log_temperature.exp()
    own = torch.arange(len(one))
    factor = math.inf if mischief == "inf" and len(one) == ROWS % BATCH else 1.0
    return {
        "loss": (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2 * factor,
        "accuracy": (logits.argmax(1) == own).float().mean(),
    }


def make_mortal(job: type[Training], folder: Path) -> None:
    """Have workers killed once each, when they have computed their 4th shard of such a job."""
    work, left = job._work, [4]

    def killed_at_the_end(*arguments: Any) -> Any:
        result, worker = work(*arguments), here()
        left[0] -= 1
        if worker is not None and left[0] <= 0:
            mark = folder / f"killed-{worker.number}"
            if not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return result

    job._work = killed_at_the_end  # type: ignore[method-assign]


if __name__ == "__main__":
    engine, workers, *rest = sys.argv[1:]
    run_dir, steps = (rest[0], int(rest[1])) if rest else (None, STEPS)
    mischief = rest[3] if rest[2:] else ""
    if mischief in ("1", "2"):
        make_mortal(Representing if mischief == "1" else BackThrough, Path(rest[2]))
    trainer = quorate.Trainer(
        Encoder,
        quorate.Gather(represent, contrast),
        optimizer=quorate.Optimize(
            lambda params: torch.optim.Adam(params, lr=0.01),
            clip_norm=1.0,
            ema_decay=0.9,
            nonfinite="skip" if mischief == "inf" else "stop",
        ),
        batch_size=BATCH,
        shards=SHARDS,
        seed=0,
        devices="cpu",
        workers=quorate.Workers(int(workers), engine=engine),
        run_dir=run_dir,
    )
    trainer.fit(data(), steps=steps, validation=data())
    assert trainer.averaged_model is not None
    averaged = trainer.averaged_model.state_dict()
    print("digest", digest([*trainer.model.state_dict().items(), *averaged.items()]))
