"""A training on many pairs, in a file or as lists, whose workers say what memory they hold.

    quorate run --devices cpu --workers 2 tests/scripts/tokens.py KIND PAIRS FOLDER

KIND: file (of FOLDER), lists, or none (few pairs). The last line is JSON: KiB of each worker
process's own memory.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import quorate
from quorate.data.tokens import Tokens
from quorate.transports.processes.worker import here

kind, number, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
STEPS = 8


def pairs() -> Iterator[tuple[Any, Any]]:
    """Questions of 3 to 8 tokens, answers of 4 to 11; of a vocabulary of 8,000."""
    values = (np.arange(20_000, dtype=np.int32) * 7919 % 8000) + 300  # no small ints, as Python has
    for row in range(number):
        at = row * 31 % 19_000
        yield values[at : at + 3 + row % 6], values[at + 20 : at + 24 + row % 8]


class Lists:
    """The same pairs as lists, as they come of a tokenizer."""

    def __init__(self) -> None:
        self.pairs = [(question.tolist(), answer.tolist()) for question, answer in pairs()]

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        question, answer = self.pairs[row]
        return torch.tensor(question, dtype=torch.int32), torch.tensor(answer, dtype=torch.int32)


path = folder / f"{number}.tokens"
data: Any = Lists() if kind == "lists" else Tokens.built(path, pairs)
gc.collect()


def summed(samples: list[Any]) -> torch.Tensor:
    return torch.stack([torch.stack([q.sum(), a.sum()]).float() for q, a in samples]) / 1e5


def own_memory() -> int:
    """Return the KiB of this process's memory that no file holds."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))


calls = 0


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    global calls
    if (worker := here()) is not None:
        calls += 1
        for row in range(10 * calls, len(data), 10 * STEPS):  # all pages, in the course of a run
            data[row]
        # Not what is private: pages of libraries and of a fork are that once nobody else has them.
        content = json.dumps({"own": own_memory()})
        (folder / f"{kind}-{worker.number}.json").write_text(content)
    return model(batch).square().mean()


torch.manual_seed(0)
trainer = quorate.Trainer(
    nn.Linear(2, 1),
    loss,
    optimizer=lambda params: torch.optim.SGD(params, lr=1e-3),
    batch_size=max(1, min(64, number)),
    shards=min(2, number),
    loading=quorate.Loading(collate=summed),
    compute=quorate.Compute(spot_check_every=0),
)
trainer.fit(data, steps=STEPS)
workers = [json.loads(each.read_text()) for each in sorted(folder.glob(f"{kind}-*.json"))]
print(json.dumps({"workers": workers}))
