"""Variational autoencoder: reconstruction plus divergence.

Not compared: a plain loop draws different latent noise.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import quorate


def pictures() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.rand(64, 36, generator=generator))


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(36, 16), nn.ReLU(), nn.Linear(16, 8))
        self.decoder = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 36))

    def forward(self, images):
        mean, log_variance = self.encoder(images).chunk(2, 1)
        latent = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decoder(latent), mean, log_variance


def elbo(images, logits, mean, log_variance):
    pixels = F.binary_cross_entropy_with_logits(logits, images, reduction="none").sum(1)
    divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1)
    return (pixels + divergence).mean()


def plain() -> nn.Module:
    torch.manual_seed(0)
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = DataLoader(pictures(), batch_size=16)
    for _ in range(3):
        for (images,) in loader:
            loss = elbo(images, *model(images))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


def accelerated() -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = DataLoader(pictures(), batch_size=16)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(3):
        for (images,) in loader:
            loss = elbo(images, *model(images))
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
    return accelerator.unwrap_model(model)


def ported() -> nn.Module:
    def loss(model, batch):
        (images,) = batch
        return elbo(images, *model(images))

    torch.manual_seed(0)
    model = VAE()
    trainer = quorate.Trainer(
        model,
        loss,
        optimizer=lambda params: torch.optim.Adam(params, lr=1e-3),
        batch_size=16,
        shards=2,
    )
    trainer.fit(pictures(), epochs=3, shuffle=False)
    return trainer.model


if __name__ == "__main__":
    ported()
