"""A small training of device-dependent operators: convolutions, dropout, BatchNorm.

    quorate run --devices cuda:0 --workers 2 tests/scripts/on_gpu.py clean

Argument: clean, atomics (adds up in the threads' order of arrival), held (fails if torch has
reserved more than the fraction ON_GPU_FRACTION), big (takes a fifth of the memory).
"""

import os
import sys
from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import quorate

ROWS, STEPS = 96, 4
HOW = sys.argv[1]


class Atomics(nn.Module):
    """Adds 65,536 numbers of very different size to 4: in float32 their order shows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        numbers = torch.arange(1 << 16, device=x.device)
        values = (numbers * 0.7).sin() * (1 + numbers % 977) ** 3
        sums = torch.zeros(4, device=x.device).index_add(0, numbers % 4, values.float())
        return x * (1 + 1e-9 * sums.mean())


def net() -> nn.Module:
    layers = {
        "first": nn.Conv2d(1, 16, 5, padding=2),
        "norm": nn.BatchNorm2d(16),
        "second": nn.Conv2d(16, 32, 3, stride=4),
        "noise": Atomics() if HOW == "atomics" else nn.ReLU(),
        "flat": nn.Flatten(),
        "dropout": nn.Dropout(0.3),
        "last": nn.Linear(32 * 9, 4),
    }
    return nn.Sequential(OrderedDict(layers))


def loss(model: Any, batch: Any) -> dict[str, torch.Tensor]:
    images, labels = batch
    device = images.device
    assert next(model.parameters()).device == device
    logits = model(images)
    if device.type == "cuda":
        assert torch.backends.cudnn.deterministic
        assert not torch.backends.cudnn.benchmark
    total = 0
    if device.type != "cpu":  # as the first shard of stages
        assert torch.accelerator.current_device_index() == device.index
        _, total = torch.accelerator.get_memory_info(device)
    if HOW == "held":
        most = float(os.environ["ON_GPU_FRACTION"]) * total
        assert torch.accelerator.max_memory_reserved(device) <= most
    if HOW == "big":
        logits = logits + torch.zeros(total // 5, dtype=torch.uint8, device=device)[0]
    found = F.cross_entropy(logits, labels)
    return {"loss": found, "accuracy": (logits.argmax(1) == labels).float().mean()}


if __name__ == "__main__":
    generator = torch.Generator().manual_seed(5)
    images = torch.randn(ROWS, 1, 12, 12, generator=generator)
    labels = torch.randint(0, 4, (ROWS,), generator=generator)
    quorate.Trainer(
        net,
        loss,
        optimizer=quorate.Optimize(
            lambda params: torch.optim.Adam(params, lr=1e-2), clip_norm=1.0, ema_decay=0.9
        ),
        batch_size=24,
        shards=4,
    ).fit(TensorDataset(images, labels), steps=STEPS)
