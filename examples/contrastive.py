"""Representations without labels: each of 512 Fashion-MNIST images is found by its other view.

    python examples/contrastive.py                                   # every device
    quorate run --devices cpu --workers 2 examples/contrastive.py    # with the same bits

InfoNCE (SimCLR, Chen et al. 2020) over all rows of a batch, whatever its shards: 511 negatives and
not the 63 of a shard. Exit code 1 if fewer of the test images are found than --target.
"""

import torch
import torch.nn.functional as F
from open_data.asked import asked
from torch import Tensor, nn

import quorate


class Encoder(nn.Module):  # 28x28 grey images to 128 features; these to 64, which are contrasted
    def __init__(self) -> None:
        super().__init__()
        first = nn.Conv2d(1, 32, 3, 2, 1), nn.GroupNorm(8, 32), nn.ReLU()
        second = nn.Conv2d(32, 64, 3, 2, 1), nn.GroupNorm(8, 64), nn.ReLU(), nn.Flatten()
        self.features = nn.Sequential(*first, *second, nn.Linear(64 * 7 * 7, 128), nn.ReLU())
        self.projection = nn.Linear(128, 64)
        self.log_temperature = nn.Parameter(torch.tensor(-1.6))  # learnt, from 0.2


def view(images: Tensor) -> Tensor:  # (B, 1, 28, 28), each moved, turned, enlarged, mirrored, noisy
    n = len(images)
    angle, zoom = 0.3 * (torch.rand(n) - 0.5), 0.75 + 0.35 * torch.rand(n)
    mirror = torch.randint(0, 2, (n,)) * 2.0 - 1
    x = torch.stack([zoom * mirror * angle.cos(), -zoom * angle.sin(), 0.3 * torch.rand(n) - 0.15])
    y = torch.stack([zoom * mirror * angle.sin(), zoom * angle.cos(), 0.3 * torch.rand(n) - 0.15])
    grid = F.affine_grid(torch.stack([x.T, y.T], 1).to(images), images.shape, align_corners=False)
    moved = F.grid_sample(images, grid, align_corners=False)
    return moved * (0.6 + 0.8 * torch.rand(n, 1, 1, 1).to(moved)) + 0.05 * torch.randn_like(moved)


def represent(model: Encoder, batch: list[Tensor]) -> tuple[Tensor, ...]:  # unit vectors (n, 64)
    views = [view(batch[0] / 255) for _ in range(2)]
    return tuple(F.normalize(model.projection(model.features(v)), dim=1) for v in views)


def info_nce(model: Encoder, views: tuple[Tensor, ...]) -> dict[str, Tensor]:
    likeness = views[0] @ views[1].T / model.log_temperature.exp()  # (B, B)
    own = torch.arange(len(likeness), device=likeness.device)
    loss = (F.cross_entropy(likeness, own) + F.cross_entropy(likeness.T, own)) / 2
    return {"loss": loss, "found": (likeness.argmax(1) == own).float().mean()}


if __name__ == "__main__":
    its = asked(__doc__, epochs=2, target=0.6, reached="least share that is found")
    gather, adam = quorate.Gather(represent, info_nce), torch.optim.Adam
    trainer = quorate.Trainer(
        Encoder, gather, optimizer=adam, batch_size=512, shards=8, run_dir=its.run_dir
    )
    trainer.fit(its.train, epochs=its.epochs)
    found = trainer.evaluate(its.test)["found"]
    print(f"{found:.4f} of the test images are found among 512")
    raise SystemExit(found < its.target)
