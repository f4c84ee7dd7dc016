"""Trains with ``compile``: processes or ranks, towers, and a stop between; prints digests.

    quorate run tests/scripts/compiled.py RUN_DIR [plain | ranks] [at | shared]

One shape of a shard, BatchNorm, draws of several kinds, a weight that is a tensor. With "at" the
loss is told its step: two ways through it, and a number that is another in each step. With "shared"
it reads a coefficient, a count, a tensor and a teacher, which the loop's body sets after each step.
"""

from __future__ import annotations

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


def loss(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    images, labels = batch
    logits = model(images)
    kept = (labels > 0).float()
    means = F.cross_entropy(logits, labels, reduction="none")
    return {"loss": (means * kept).sum() / kept.sum(), "weight": kept.sum()}


def told(model: nn.Module, batch: Any, at: Any) -> dict[str, Any]:
    found: dict[str, Any] = loss(model, batch)
    beta = (at.step + 1) / 7
    if at.step > 2:
        beta = beta + 0.5 * at.epoch
    labels = torch.from_numpy(at.rows) % 2
    return {**found, "loss": found["loss"] * beta + 1e-3 * labels.float().mean(), "beta": beta}


teacher = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).eval()
if "shared" in sys.argv:  # with one, code is compiled in another way
    course = quorate.Shared("course", beta=0.0, count=0, bank=torch.zeros(3), teacher=teacher)


def taught(model: nn.Module, batch: Any) -> dict[str, Any]:
    found: dict[str, Any] = loss(model, batch)
    aside = (course.teacher(batch[0]) + course.bank).square().mean() * model.first.weight.mean()
    value = found["loss"] * (1 + course.count) + course.beta * aside
    return {**found, "loss": value, "beta": course.beta}


def set_shared(step: int) -> None:
    course.beta, course.count, course.bank = step / 10, step % 3 - 1, torch.full((3,), step / 7)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.fill_(step / 20)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(48, 6, generator=generator)
    return TensorDataset(images, torch.randint(0, 3, (48,), generator=generator))


def trained(
    engine: str,
    workers: int,
    *,
    steps: int = 6,
    run_dir: str | None = None,
    resumes: bool = False,
) -> str:
    trainer = quorate.Trainer(
        Net,
        told if "at" in sys.argv else taught if "shared" in sys.argv else loss,
        optimizer=torch.optim.Adam,
        batch_size=24,
        shards=3,
        devices="cpu",
        workers=quorate.Workers(workers, engine=engine),
        compute=quorate.Compute(compile="plain" not in sys.argv),
        run_dir=run_dir,
    )
    losses = []
    if "shared" in sys.argv and not resumes:
        set_shared(0)
    for report in trainer.updates(data(), steps=steps):
        losses.append(report.loss)
        if "shared" in sys.argv:
            set_shared(report.global_step)
    if run_dir is not None:
        trainer.save()
    if losses:
        print("last loss", losses[-1], flush=True)
    return digest(trainer.model.state_dict().items())


if __name__ == "__main__":
    engine = "collective" if "ranks" in sys.argv else "processes"
    found = {} if "plain" in sys.argv else {f"2 of {engine}": trained(engine, 2)}
    trained("towers", 1, steps=3, run_dir=sys.argv[1])
    found["3 towers, resumed"] = trained("towers", 3, run_dir=sys.argv[1], resumes=True)
    for name, text in found.items():
        print("digest", text, name)
