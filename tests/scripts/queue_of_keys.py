"""Momentum contrast (He et al., 2020) with its queue in ``Shared``: python queue_of_keys.py STEPS.

The queue is the same for any number of shards: the keys of a whole batch go into it, after the
update, in the order of the batch.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import quorate

KEYS, BATCH, SIZE = 96, 24, 16

torch.manual_seed(0)
encoder = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, SIZE))
slow = copy.deepcopy(encoder)
queue = quorate.Shared("queue", keys=F.normalize(torch.randn(KEYS, SIZE), dim=1))
momentum = quorate.Shared("momentum", encoder=slow)


def represent(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    one, other = batch
    return F.normalize(model(one), dim=1), F.normalize(momentum.encoder(other), dim=1).detach()


def contrast(model: nn.Module, rows: Any) -> dict[str, torch.Tensor]:
    queries, keys = rows  # of the whole batch, in order
    own = (queries * keys).sum(1, keepdim=True)
    logits = torch.cat([own, queries @ queue.keys.T], 1) / 0.2
    found = {"loss": F.cross_entropy(logits, torch.zeros(len(queries), dtype=torch.long))}
    if model.training:
        found["keys"] = keys.detach().float().view(torch.int32)  # its bits, which totals carry
    return found


class Enqueue(quorate.Callback):
    """Puts the keys of each batch into the queue, and moves the slow encoder."""

    def started(self, trainer: Any) -> None:
        self._fast = trainer.model

    def updated(self, report: quorate.Report) -> None:
        keys = report.totals["keys"].to(torch.int32).view(torch.float32)
        queue.keys = torch.cat([queue.keys[len(keys) :], keys])
        with torch.no_grad():
            for mine, new in zip(slow.parameters(), self._fast.parameters(), strict=True):
                mine.lerp_(new, 0.01)


def data() -> TensorDataset:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(120, 8, generator=g)
    return TensorDataset(x, x + 0.1 * torch.randn(120, 8, generator=g))


def main() -> None:
    trainer = quorate.Trainer(
        encoder,
        quorate.Gather(represent, contrast),
        totals={"keys": lambda _: {}},
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        batch_size=BATCH,
        shards=4,
    )
    trainer.fit(data(), steps=int(sys.argv[1]), shuffle=False, callbacks=[Enqueue()])


if __name__ == "__main__":
    main()
