"""How far apart two runs get that differ in rounding alone, and two that differ in their seed.

    python benchmarks/how_far_apart.py

One batch of 64 rows is summed as 1, 2 and 8 shards: the same sum in another order. The network is
of 5,000 parameters, without dropout and BatchNorm, on images of bars in noise; SGD with momentum.
A line is about one pair of runs after so many updates.

Legend: W weights, as one vector; ||W|| its norm.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import quorate

AFTER = (1, 10, 100, 300, 1000)


def bars(rows: int, seed: int) -> TensorDataset:
    """Images of noise with a bar, and whether it lies."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(rows, 1, 8, 8, generator=generator)
    lying = torch.randint(2, (rows,), generator=generator)
    places = torch.randint(8, (rows,), generator=generator)
    for image, is_lying, place in zip(images[:, 0], lying, places, strict=True):
        (image if is_lying else image.T)[place] += 1.5
    return TensorDataset(images, lying)


class Net(nn.Sequential):
    """8x8 images to two logits."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 16, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(576, 8),
            nn.ReLU(),
            nn.Linear(8, 2),
        )


def loss(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Cross entropy and accuracy, means over rows."""
    images, lying = batch
    logits = model(images)
    return {
        "loss": F.cross_entropy(logits, lying),
        "accuracy": (logits.argmax(1) == lying).float().mean(),
    }


def run(shards: int, seed: int = 0) -> tuple[dict[int, torch.Tensor], dict[str, float]]:
    """Return W after some updates, and loss and accuracy on other rows at the end."""
    trainer = quorate.Trainer(
        Net,
        loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.02, momentum=0.9),
        batch_size=64,
        shards=shards,
        seed=seed,
        devices="cpu",
        workers=1,
    )
    weights = {}
    for report in trainer.updates(bars(6400, seed=0), steps=max(AFTER)):
        if report.global_step in AFTER:
            parameters = [p.detach().flatten() for p in trainer.model.parameters()]
            weights[report.global_step] = torch.cat(parameters).clone()
    return weights, trainer.evaluate(bars(2000, seed=1))


def main() -> None:
    """Print how far pairs of runs are apart."""
    first, at_end = run(shards=1)
    print("pair               updates  weights that differ  ||difference|| / ||W||")
    ends = {"1 shard": at_end}
    for name, shards, seed in (("2 shards", 2, 0), ("8 shards", 8, 0), ("another seed", 1, 1)):
        weights, ends[name] = run(shards, seed)
        for updates, here in weights.items():
            there = first[updates]
            share = (here != there).float().mean()
            apart = (here - there).norm() / there.norm()
            print(f"1 shard, {name:12} {updates:5,} {share:15.0%} {apart:20.1e}")
    for name, metrics in ends.items():
        print(f"{name:12} test loss {metrics['loss']:.6f}, accuracy {metrics['accuracy']:.4f}")


if __name__ == "__main__":
    main()
