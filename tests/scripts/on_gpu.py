"""A small training with what devices do differently: convolutions, dropout, BatchNorm.

    quorate run --devices cuda:0 --workers 2 tests/scripts/on_gpu.py 6 clean

Arguments: updates; one of clean, atomics (adds up in the order in which threads come), killed (a
worker process kills itself once: ON_GPU_KILLED is a file that it makes), held (fails if torch has
reserved more than the fraction ON_GPU_FRACTION), big (takes a fifth of the memory).
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

ROWS = 96
STEPS, HOW = int(sys.argv[1]), sys.argv[2]
# The coordinator's number, also in the workers, which have its environment.
FIRST = os.environ.setdefault("ON_GPU_FIRST", str(os.getpid()))
calls = 0


class Atomics(nn.Module):
    """Adds 65,536 numbers of very different size to 4: in float32 their order shows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        numbers = torch.arange(1 << 16, device=x.device)
        values = (numbers * 0.7).sin() * (1 + numbers % 977) ** 3
        sums = torch.zeros(4, device=x.device).index_add(0, numbers % 4, values.float())
        return x * (1 + 1e-9 * sums.mean())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 16, 5, padding=2)
        self.norm = nn.BatchNorm2d(16)
        self.second = nn.Conv2d(16, 32, 3, padding=1)
        self.noise = Atomics() if HOW == "atomics" else nn.Identity()
        self.dropout = nn.Dropout(0.3)
        self.last = nn.Linear(32 * 9, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.first(x))), 2)
        x = self.noise(F.max_pool2d(F.relu(self.second(x)), 2))
        logits: torch.Tensor = self.last(self.dropout(x.flatten(1)))
        return logits


def kill_once() -> None:
    """In a worker process, in the middle of its second shard."""
    global calls
    calls += 1
    flag = Path(os.environ["ON_GPU_KILLED"])
    if os.getpid() != int(FIRST) and calls == 2 and not flag.exists():
        flag.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def loss(model: Any, batch: Any) -> dict[str, torch.Tensor]:
    images, labels = batch
    device = images.device
    assert next(model.parameters()).device == device
    logits = model(images)
    if device.type == "cuda":
        assert torch.backends.cudnn.deterministic
        assert not torch.backends.cudnn.benchmark
        assert torch.cuda.current_device() == device.index
    if HOW == "killed":
        kill_once()
    if HOW == "held" and device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        most = float(os.environ["ON_GPU_FRACTION"]) * total
        assert torch.cuda.max_memory_reserved(device) <= most
    if HOW == "big":
        total = 1 << 20
        if device.type == "cuda":
            total = torch.cuda.get_device_properties(device).total_memory
        logits = logits + torch.zeros(total // 5, dtype=torch.uint8, device=device)[0]
    found = F.cross_entropy(logits, labels)
    return {"loss": found, "accuracy": (logits.argmax(1) == labels).float().mean()}


if __name__ == "__main__":
    generator = torch.Generator().manual_seed(5)
    images = torch.randn(ROWS, 1, 12, 12, generator=generator)
    labels = torch.randint(0, 4, (ROWS,), generator=generator)
    quorate.Trainer(
        Net,
        loss,
        optimizer=quorate.Optimize(
            lambda params: torch.optim.Adam(params, lr=1e-2), clip_norm=1.0, ema_decay=0.9
        ),
        batch_size=24,
        shards=4,
    ).fit(TensorDataset(images, labels), steps=STEPS)
