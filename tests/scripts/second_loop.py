"""What a script does after its first training loop.

python tests/scripts/second_loop.py FOLDER
"""

from __future__ import annotations

import atexit
import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import quorate

folder = Path(sys.argv[1])


def note(text: str) -> None:
    with (folder / "notes").open("a") as file:
        file.write(f"{text}\n")


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return model(batch[0]).square().mean()


def rows(seed: int) -> TensorDataset:
    return TensorDataset(torch.randn(64, 6, generator=torch.Generator().manual_seed(seed)))


note("before")
atexit.register(note, "at exit")
torch.manual_seed(0)
trainer = quorate.Trainer(
    nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)),
    loss,
    optimizer=lambda params: torch.optim.Adam(params, lr=1e-2),
    batch_size=16,
    shards=4,
    devices="cpu",
    workers=2,
)
data, other = rows(0), rows(1)
try:
    trainer.fit(data, epochs=1, validation=other)
    note("after fit")
finally:
    note("finally")
values = [trainer.evaluate(data), trainer.evaluate(other)]
print("other data")
trainer.fit(other, epochs=2)
values.append(trainer.evaluate(other))
print(json.dumps(values))
