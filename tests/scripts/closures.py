"""Trains with an optimizer that wants a step's gradient at other parameters too; prints the digest.

    quorate run tests/scripts/closures.py sam|lbfgs towers|processes WORKERS [FOLDER]

With a folder, each worker but the coordinator's own is killed once, at its 9th shard: by then those
of a step are computed again.
"""

from __future__ import annotations

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
from quorate.transports.processes.worker import here

ROWS, BATCH, SHARDS, STEPS = 72, 24, 3, 6


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation (Foret et al., 2021), around another optimizer, as usual."""

    def __init__(self, params: Any, base: type, rho: float = 0.05, **options: Any) -> None:
        super().__init__(params, {"rho": rho, **options})
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in held]).norm()
        for p in held:
            self.state[p]["before"] = p.detach().clone()
            p.add_(p.grad * self.param_groups[0]["rho"] / (norm + 1e-12))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is not None, "SAM needs a closure"
        self.first_step()
        with torch.enable_grad():
            closure()
        for p, kept in self.state.items():
            p.data = kept["before"]  # as it is mostly written: another tensor's memory
        self.base.step()


OPTIMIZERS = {
    "sam": lambda params: SAM(params, torch.optim.SGD, lr=0.1, momentum=0.9),
    "lbfgs": lambda params: torch.optim.LBFGS(params, lr=0.5, max_iter=4),
    "wolfe": lambda params: torch.optim.LBFGS(
        params, lr=0.5, max_iter=4, line_search_fn="strong_wolfe"
    ),
}


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, 6, generator=generator)
    return TensorDataset(x, torch.randint(0, 3, (ROWS,), generator=generator))


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3))


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    x, labels = batch
    return F.cross_entropy(model(x), labels)


class Mortal:
    """The loss function, in a worker that is killed once."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.left = folder, 9

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        if (worker := here()) is not None:
            self.left -= 1
            if not self.left and not (mark := self.folder / f"killed-{worker.number}").exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return loss(model, batch)


if __name__ == "__main__":
    name, engine, workers, *folder = sys.argv[1:]
    trainer = quorate.Trainer(
        model,
        Mortal(Path(folder[0])) if folder else loss,
        optimizer=OPTIMIZERS[name],
        batch_size=BATCH,
        shards=SHARDS,
        devices="cpu",
        workers=quorate.Workers(int(workers), engine=engine),
    )
    trainer.fit(data(), steps=STEPS)
    print("digest", digest(trainer.model.state_dict().items()))
