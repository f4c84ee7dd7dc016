"""Neural field: rays as rows, positional encoding, colours by volume rendering."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import quorate


def rays() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    directions = F.normalize(torch.randn(256, 3, generator=generator), dim=1)
    return TensorDataset(directions, directions.abs())


class Field(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", 2.0 ** torch.arange(4))
        self.body = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, directions):
        depths = torch.linspace(0.5, 2, 8)
        places = directions[:, None] * depths[:, None]  # (B, 8, 3)
        waves = (places[..., None] * self.frequencies).flatten(2)
        found = self.body(torch.cat([waves.sin(), waves.cos()], 2))
        opacity = 1 - torch.exp(-F.softplus(found[..., 3]) * 0.2)
        passing = torch.cumprod(1 - opacity + 1e-6, 1).roll(1, 1)
        passing = torch.cat([torch.ones_like(passing[:, :1]), passing[:, 1:]], 1)
        return ((opacity * passing)[..., None] * found[..., :3].sigmoid()).sum(1)


def plain() -> nn.Module:
    torch.manual_seed(0)
    model = Field()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-5)
    loader = DataLoader(rays(), batch_size=64)
    for _ in range(3):
        for directions, colours in loader:
            loss = F.mse_loss(model(directions), colours)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


def accelerated() -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = Field()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-5)
    loader = DataLoader(rays(), batch_size=64)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(3):
        for directions, colours in loader:
            loss = F.mse_loss(model(directions), colours)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
    return accelerator.unwrap_model(model)


def ported() -> nn.Module:
    def loss(model, batch):
        directions, colours = batch
        return F.mse_loss(model(directions), colours)

    torch.manual_seed(0)
    model = Field()
    trainer = quorate.Trainer(
        model,
        loss,
        optimizer=lambda params: torch.optim.Adam(params, lr=1e-3, eps=1e-5),
        batch_size=64,
        shards=2,
    )
    trainer.fit(rays(), epochs=3, shuffle=False)
    return trainer.model


if __name__ == "__main__":
    ported()
