"""Normalizing flow: affine couplings (RealNVP), the exact log-likelihood."""

import math

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import quorate


def points() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    angle = math.pi * torch.rand(128, 1, generator=generator)
    moon = torch.cat([angle.cos(), angle.sin()], 1)
    return TensorDataset(moon + 0.1 * torch.randn(128, 2, generator=generator))


class Flow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.couplings = nn.ModuleList(
            nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 2)) for _ in range(4)
        )

    def forward(self, points):
        one, other = points.chunk(2, 1)
        volume = torch.zeros(len(points))
        for coupling in self.couplings:
            scale, shift = coupling(one).chunk(2, 1)
            other = other * scale.tanh().exp() + shift
            volume = volume + scale.tanh().squeeze(1)
            one, other = other, one
        latent = torch.cat([one, other], 1)
        return volume - 0.5 * latent.square().sum(1) - math.log(2 * math.pi)


def plain() -> nn.Module:
    torch.manual_seed(0)
    model = Flow()
    optimizer = torch.optim.Adamax(model.parameters(), lr=2e-3)
    loader = DataLoader(points(), batch_size=32)
    for _ in range(3):
        for (rows,) in loader:
            loss = -model(rows).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


def accelerated() -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = Flow()
    optimizer = torch.optim.Adamax(model.parameters(), lr=2e-3)
    loader = DataLoader(points(), batch_size=32)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(3):
        for (rows,) in loader:
            loss = -model(rows).mean()
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
    return accelerator.unwrap_model(model)


def ported() -> nn.Module:
    torch.manual_seed(0)
    model = Flow()
    trainer = quorate.Trainer(
        model,
        lambda model, batch: -model(*batch).mean(),
        optimizer=lambda params: torch.optim.Adamax(params, lr=2e-3),
        batch_size=32,
        shards=2,
    )
    trainer.fit(points(), epochs=3, shuffle=False)
    return trainer.model


if __name__ == "__main__":
    ported()
