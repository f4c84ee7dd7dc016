"""Two models in one training: a generator of clothes and its critic, on Fashion-MNIST.

    python examples/gan.py                                   # every device
    quorate run --devices cpu --workers 2 examples/gan.py    # two CPU workers: the same bits

It ends with exit code 1 if what the averaged generator makes is further from the test images than
--target: the mean over pixels of how far their means and their deviations are apart, of 2.
"""

import torch
import torch.nn.functional as F
from open_data.asked import asked
from torch import Tensor, nn

import quorate


def generator() -> nn.Module:  # noise (B, 64) to images (B, 1, 28, 28) from -1 to 1
    first = nn.Linear(64, 32 * 7 * 7), nn.Unflatten(1, (32, 7, 7)), nn.BatchNorm2d(32), nn.ReLU()
    second = nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.BatchNorm2d(16), nn.ReLU()
    return nn.Sequential(*first, *second, nn.ConvTranspose2d(16, 1, 4, 2, 1), nn.Tanh())


def critic() -> nn.Module:  # images (B, 1, 28, 28) to logits (B, 1): whether they are real
    first = nn.Conv2d(1, 16, 4, 2, 1), nn.LeakyReLU(0.2)
    second = nn.Conv2d(16, 32, 4, 2, 1), nn.LeakyReLU(0.2), nn.Dropout(0.3)
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(32 * 7 * 7, 1))


def d_loss(model: nn.ModuleDict, batch: list[Tensor]) -> dict[str, Tensor]:
    real = model["d"](batch[0] / 127.5 - 1)
    fake = model["d"](model["g"](torch.randn(len(real), 64, device=real.device)))  # no detach()
    right = ((real > 0).float().mean() + (fake < 0).float().mean()) / 2
    return {"loss": F.softplus(-real).mean() + F.softplus(fake).mean(), "right": right}


def g_loss(model: nn.ModuleDict, batch: list[Tensor]) -> Tensor:  # to be taken for real
    noise = torch.randn(len(batch[0]), 64, device=batch[0].device)
    return F.softplus(-model["d"](model["g"](noise))).mean()


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=5e-4, betas=(0.5, 0.99))


if __name__ == "__main__":
    its = asked(__doc__, epochs=3, target=0.15, reached="greatest distance")
    models, losses = {"g": generator, "d": critic}, {"d": d_loss, "g": g_loss}  # a round: d, then g
    adams = {"d": adam, "g": quorate.Optimize(adam, ema_decay=0.99)}
    trainer = quorate.Trainer(
        models, losses, optimizer=adams, batch_size=64, shards=4, run_dir=its.run_dir
    )
    trainer.fit(its.train, epochs=its.epochs, validation=its.test)
    noise = torch.randn(2000, 64, generator=torch.Generator().manual_seed(0))
    made = trainer.averaged_model["g"].cpu().eval()(noise).detach()
    real = its.test.tensors[0] / 127.5 - 1
    distance = sum((of(real, 0) - of(made, 0)).abs().mean() for of in (torch.mean, torch.std))
    print(f"distance from the test images {distance:.3f}, target {its.target}")
    raise SystemExit(bool(distance > its.target))
