"""A training loop on a Ray cluster that lasts while workers, actors and nodes come and go.

    quorate run --engine ray --workers 1:3 tests/scripts/on_ray.py stop=FILE
    quorate run --engine towers tests/scripts/on_ray.py updates=120

Words: a file that ends it, once it is there; or how many updates it makes. It prints "N take part"
whenever N changes, and at the end a line of JSON: how many updates there were, and the longest time
that one took after the tenth. An update more or less changes no bit of those before: a tower that
makes as many has the same digest.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import quorate

WORDS = dict(word.split("=", 1) for word in sys.argv[1:])
STOP, UPDATES = Path(WORDS.get("stop", "never")), int(WORDS.get("updates", "1000000"))


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    if "updates" not in WORDS:
        time.sleep(0.01)
    error: torch.Tensor = model(batch[0]).square().mean()
    return error


if __name__ == "__main__":
    torch.manual_seed(0)
    trainer = quorate.Trainer(
        nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1)),
        loss,
        optimizer=lambda params: torch.optim.Adam(params, lr=1e-2),
        batch_size=16,
        shards=4,
    )
    data = TensorDataset(torch.randn(64, 6, generator=torch.Generator().manual_seed(0)))
    present, longest_s, at = 0, 0.0, time.monotonic()
    updates = trainer.updates(data, steps=UPDATES)
    for update in updates:
        now = time.monotonic()
        longest_s = max(longest_s, now - at) if update.global_step > 10 else 0.0
        at = now
        there = [w for w in trainer.workers if not w.is_gone and w.phase != "starting"]
        if present != len(there):
            present = len(there)
            print(f"{present} take part", flush=True)
        if STOP.exists():
            break
    updates.close()
    trainer.save()
    print(json.dumps({"updates": update.global_step, "longest_s": longest_s}))
