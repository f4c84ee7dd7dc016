"""VQ-VAE: a codebook, straight-through gradients, a commitment loss; einops."""

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import quorate


def pictures() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.rand(48, 1, 8, 8, generator=generator))


class VQVAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Conv2d(1, 4, 2, stride=2)
        self.codes = nn.Embedding(16, 4)
        self.decoder = nn.ConvTranspose2d(4, 1, 2, stride=2)

    def forward(self, images):
        found = rearrange(self.encoder(images), "b c h w -> b h w c")
        codes = self.codes(torch.cdist(found.flatten(0, 2), self.codes.weight).argmin(1))
        codes = codes.view_as(found)
        commitment = F.mse_loss(codes, found.detach()) + 0.25 * F.mse_loss(found, codes.detach())
        passed = found + (codes - found).detach()
        return self.decoder(rearrange(passed, "b h w c -> b c h w")), commitment


def plain() -> nn.Module:
    torch.manual_seed(0)
    model = VQVAE()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(pictures(), batch_size=16)
    for _ in range(3):
        for (images,) in loader:
            found, commitment = model(images)
            loss = F.mse_loss(found, images) + commitment
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


def accelerated() -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = VQVAE()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(pictures(), batch_size=16)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(3):
        for (images,) in loader:
            found, commitment = model(images)
            loss = F.mse_loss(found, images) + commitment
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
    return accelerator.unwrap_model(model)


def ported() -> nn.Module:
    def loss(model, batch):
        (images,) = batch
        found, commitment = model(images)
        return F.mse_loss(found, images) + commitment

    torch.manual_seed(0)
    model = VQVAE()
    trainer = quorate.Trainer(
        model,
        loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        batch_size=16,
        shards=2,
    )
    trainer.fit(pictures(), epochs=3, shuffle=False)
    return trainer.model


if __name__ == "__main__":
    ported()
