"""Two models in one training: a generator of clothes and its critic, on Fashion-MNIST.

    python examples/gan.py                                             # every device
    quorate run --devices cpu --workers 1 examples/gan.py              # one CPU worker, same bits
    quorate run --devices cuda:0,cuda:1 examples/gan.py --epochs 20    # two GPUs

It ends with exit code 1 if what the averaged generator makes is further from the test images than
--target: the mean over pixels of how far their means and their deviations are apart, of 2.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from open_data import fashion_mnist
from torch import nn

import quorate

Z = 64  # numbers of noise per image


def generator() -> nn.Module:
    """Noise (B, Z) to images (B, 1, 28, 28) from -1 to 1."""
    return nn.Sequential(
        *(nn.Linear(Z, 32 * 7 * 7), nn.Unflatten(1, (32, 7, 7)), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.ConvTranspose2d(16, 1, 4, 2, 1), nn.Tanh()),
    )


def critic() -> nn.Module:
    """Images (B, 1, 28, 28) to logits (B, 1): whether they are real."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 4, 2, 1), nn.LeakyReLU(0.2)),
        *(nn.Conv2d(16, 32, 4, 2, 1), nn.LeakyReLU(0.2), nn.Dropout(0.3)),
        *(nn.Flatten(), nn.Linear(32 * 7 * 7, 1)),
    )


def d_loss(model: nn.ModuleDict, batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The critic's loss. In its phase no gradient goes to the generator: no detach() is needed."""
    real = model["d"](batch[0] / 127.5 - 1)
    fake = model["d"](model["g"](torch.randn(len(batch[0]), Z, device=real.device)))
    loss = F.softplus(-real).mean() + F.softplus(fake).mean()
    return {"loss": loss, "right": ((real > 0).float().mean() + (fake < 0).float().mean()) / 2}


def g_loss(model: nn.ModuleDict, batch: list[torch.Tensor]) -> torch.Tensor:
    """The generator's loss: what it makes is to be taken for real."""
    noise = torch.randn(len(batch[0]), Z, device=batch[0].device)
    return F.softplus(-model["d"](model["g"](noise))).mean()


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of each phase: one of its own."""
    return torch.optim.Adam(parameters, lr=5e-4, betas=(0.5, 0.99))


def made_by(model: nn.Module, images: int) -> torch.Tensor:
    """Return images (images, 1, 28, 28) by the generator of a model, always of the same noise."""
    noise = torch.randn(images, Z, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        made: torch.Tensor = model.get_submodule("g").cpu().eval()(noise)
    return made


def main() -> None:
    """Train, and compare what was learned with the test images."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64, help="rows per update")
    parser.add_argument("--steps", type=int, help="updates in all, of both phases")
    parser.add_argument("--data", type=Path, help="a folder with the four IDX files")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/gan"))
    parser.add_argument("--target", type=float, default=0.15, help="greatest distance")
    options = parser.parse_args()

    train, test = fashion_mnist.load(options.data)
    trainer = quorate.Trainer(
        {"g": generator, "d": critic},
        {"d": d_loss, "g": g_loss},  # a round: an update of d, then one of g on the same images
        optimizer={"d": adam, "g": quorate.Optimize(adam, ema_decay=0.99)},
        batch_size=options.batch_size,
        shards=4,
        run_dir=options.run_dir,
    )
    trainer.fit(train, epochs=options.epochs, steps=options.steps, validation=test)
    averaged = trainer.averaged_model
    assert averaged is not None
    real, made = test.tensors[0] / 127.5 - 1, made_by(averaged, 2000)
    apart = [
        (a - b).abs().mean() for a, b in ((real.mean(0), made.mean(0)), (real.std(0), made.std(0)))
    ]
    distance = float(sum(apart))
    print(f"distance from the test images {distance:.3f}, target {options.target}")
    print(f"results: {trainer.run_dir}  (quorate inspect {trainer.run_dir})")
    if distance > options.target:
        sys.exit(1)


if __name__ == "__main__":
    main()
