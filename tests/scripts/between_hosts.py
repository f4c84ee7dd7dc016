"""A training that lasts a while, for ranks of several hosts that lose one another.

    torchrun --nproc-per-node 2 tests/scripts/between_hosts.py RUN_DIR STEPS SECONDS
    quorate run --engine towers tests/scripts/between_hosts.py RUN_DIR STEPS SECONDS

Arguments: where it is saved, every second step; updates; seconds that each shard takes at least.
Rank 0 says each step, on how many ranks, and the digest in the end.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import quorate
from quorate.replica.digest import digest
from quorate.transports.collective.place import own_place

run_dir, steps, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
place = own_place()
SIZE = 1 if place is None else place.size


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    x, labels = batch
    time.sleep(seconds)
    return F.cross_entropy(model(x), labels)


class Say(quorate.Callback):
    def updated(self, report: Any) -> None:
        print(f"made step {report.global_step} on {SIZE}", flush=True)


if __name__ == "__main__":
    torch.manual_seed(2)
    layers = [
        nn.Linear(20, 600),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(600, 400),
        nn.Linear(400, 3),
    ]
    trainer = quorate.Trainer(
        nn.Sequential(*layers),
        loss,
        optimizer=quorate.Optimize(lambda params: torch.optim.Adam(params, lr=1e-2), clip_norm=1.0),
        batch_size=24,
        shards=4,
        devices="cpu",
        run_dir=quorate.RunDir(run_dir, save_every_steps=2),
    )
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(96, 20, generator=generator)
    data = TensorDataset(x, torch.randint(0, 3, (96,), generator=generator))
    trainer.fit(data, steps=steps, callbacks=[Say()])
    print("digest", digest(trainer.model.state_dict().items()), flush=True)
