"""Bars in noise, upright or lying, with quorate.

quorate run --devices cpu --workers 2 accelerate_ours.py
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import quorate


def bars(rows: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(rows, 1, 8, 8, generator=generator)
    lying = torch.randint(2, (rows,), generator=generator)
    places = torch.randint(8, (rows,), generator=generator)
    for image, is_lying, place in zip(images[:, 0], lying, places, strict=True):
        (image if is_lying else image.T)[place] += 1.5
    return TensorDataset(images, lying)


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(576, 2)
        )


def loss(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    images, lying = batch
    logits = model(images)
    return {
        "loss": F.cross_entropy(logits, lying),
        "accuracy": (logits.argmax(1) == lying).float().mean(),
    }


trainer = quorate.Trainer(
    Net,
    loss,
    optimizer=quorate.Optimize(
        lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
        schedule=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3 * 32),
        clip_norm=1.0,
    ),
    batch_size=64,  # 2 processes x 2 accumulated x 16
    shards=4,
    run_dir="runs/bars",
)
trainer.fit(bars(2000, seed=0), epochs=3, validation=bars(501, seed=1))
