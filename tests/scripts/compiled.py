"""Trains with ``compile`` on ranks; or on processes, and on towers with a stop; prints digests.

    quorate run tests/scripts/compiled.py RUN_DIR ranks|processes

A single shape of a shard, BatchNorm, draws of several kinds, a tensor as weight. The loss receives
the step: two branches, and a number that changes in each step.
"""

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import quorate
from quorate.replica.digest import digest


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16)
        self.dropout = nn.Dropout(0.5)
        self.last = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.dropout(torch.relu(self.norm(self.first(x))))
        kept = torch.empty_like(inner).bernoulli_(0.9) * torch.bernoulli(
            torch.full_like(inner, 0.9)
        )
        return self.last(inner * kept + 0.01 * torch.rand_like(inner))


def loss(model: nn.Module, batch: Any, at: Any) -> dict[str, Any]:
    images, labels = batch
    logits = model(images)
    kept = (labels > 0).float()
    means = F.cross_entropy(logits, labels, reduction="none")
    beta = (at.step + 1) / 7
    if at.step > 2:
        beta = beta + 0.5 * at.epoch
    odd = (torch.from_numpy(at.rows) % 2).float().mean()
    found = (means * kept).sum() / kept.sum() * beta + 1e-3 * odd
    return {"loss": found, "weight": kept.sum(), "beta": beta}


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(48, 6, generator=generator)
    return TensorDataset(images, torch.randint(0, 3, (48,), generator=generator))


def trained(engine: str, workers: int, steps: int = 6, run_dir: str | None = None) -> str:
    trainer = quorate.Trainer(
        Net,
        loss,
        optimizer=torch.optim.Adam,
        batch_size=24,
        shards=3,
        devices="cpu",
        workers=quorate.Workers(workers, engine=engine),
        compute=quorate.Compute(compile=True),
        run_dir=run_dir,
    )
    losses = [report.loss for report in trainer.updates(data(), steps=steps)]
    if run_dir is not None:
        trainer.save()
    print("last loss", losses[-1], flush=True)
    return digest(trainer.model.state_dict().items())


if __name__ == "__main__":
    if sys.argv[2] == "ranks":
        found = {"ranks": trained("collective", 2)}
    else:
        found = {"a process": trained("processes", 1)}
        trained("towers", 1, steps=3, run_dir=sys.argv[1])
        found["3 towers, resumed"] = trained("towers", 3, run_dir=sys.argv[1])
    for name, text in found.items():
        print("digest", text, name)
