"""A training loop that counts how often results of several workers came as one sum.

    quorate run --engine ray --address HOST:PORT --workers 3 tests/scripts/ray_sums.py 60

Argument: updates. Prints a line of JSON at the end: the digest, and how many answers had so many
results in them.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter

import torch
from torch import nn
from torch.utils.data import TensorDataset

import quorate
from quorate.replica.digest import digest
from quorate.transports.processes.channel import ProcessesChannel
from quorate.transports.processes.wire import Message
from quorate.transports.processes.worker import here

found: Counter[int] = Counter()
take = ProcessesChannel.done


def counted(self: ProcessesChannel, worker: int, message: Message) -> None:
    found[len(message.get("group", [worker]))] += 1
    take(self, worker, message)


ProcessesChannel.done = counted


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    if here() is not None:
        time.sleep(0.03)  # half of that a result waits for others
    return model(batch[0]).square().mean()


torch.manual_seed(0)
trainer = quorate.Trainer(
    nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1)),
    loss,
    optimizer=lambda params: torch.optim.Adam(params, lr=1e-2),
    batch_size=12,
    shards=3,
)
data = torch.randn(60, 6, generator=torch.Generator().manual_seed(0))
trainer.fit(TensorDataset(data), steps=int(sys.argv[1]))
print(json.dumps({"digest": digest(trainer.model.state_dict().items()), "sums": found}))
