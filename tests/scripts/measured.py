"""A small loop for measuring, with slow parts on request.

    quorate bench tests/scripts/measured.py --workers 1,2 straggler
    quorate bench --workers 1,2 tests/scripts/measured.py input

straggler: the last of two workers sleeps in forward. input: rows sleep. loop: a user's own loop
with sleep in the body. evaluation: as much evaluation as training. even: nothing.
"""

import sys
import threading
import time

import torch
from torch import nn
from torch.utils.data import Dataset

import quorate
from quorate.engines.processes.worker import here

SLEEP_S = 0.01


class Rows(Dataset[torch.Tensor]):
    def __init__(self, row_s: float) -> None:
        self.row_s = row_s
        self.data = torch.randn(640, 6, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, row: int) -> torch.Tensor:
        time.sleep(self.row_s)
        return self.data[row]


def is_last() -> bool:
    worker = here()
    name = threading.current_thread().name
    return name == "quorate-tower-1" if worker is None else worker.number == 1


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    time.sleep(SLEEP_S * (4 if slow == "straggler" and is_last() else 1))
    return model(batch).square().mean()


slow = sys.argv[1] if len(sys.argv) > 1 else "even"
trainer = quorate.Trainer(
    lambda: nn.Sequential(nn.Linear(6, 64), nn.Dropout(0.2), nn.Linear(64, 1)),
    loss,
    optimizer=lambda params: torch.optim.SGD(params, lr=1e-2),
    batch_size=32,
    shards=4,
)
data = Rows(0.01 if slow == "input" else 0.0)
if slow == "loop":
    for _update in trainer.updates(data, epochs=100_000):
        time.sleep(SLEEP_S * 4)
else:
    trainer.fit(data, epochs=100_000, validation=data if slow == "evaluation" else None)
