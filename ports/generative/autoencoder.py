"""Denoising autoencoder: noise made by the dataset, RMSprop."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import quorate


class Noisy(Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, row: int):
        generator = torch.Generator().manual_seed(row)
        clean = torch.rand(36, generator=generator)
        return clean + 0.1 * torch.randn(36, generator=generator), clean


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(36, 16),
        nn.ReLU(),
        nn.Linear(16, 4),
        nn.Linear(4, 16),
        nn.ReLU(),
        nn.Linear(16, 36),
    )


def plain() -> nn.Module:
    model = network()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, eps=1e-5)
    loader = DataLoader(Noisy(), batch_size=16)
    for _ in range(3):
        for noisy, clean in loader:
            loss = F.mse_loss(model(noisy), clean)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


def accelerated() -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = network()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, eps=1e-5)
    loader = DataLoader(Noisy(), batch_size=16)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(3):
        for noisy, clean in loader:
            loss = F.mse_loss(model(noisy), clean)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
    return accelerator.unwrap_model(model)


def ported() -> nn.Module:
    def loss(model, batch):
        noisy, clean = batch
        return F.mse_loss(model(noisy), clean)

    trainer = quorate.Trainer(
        network(),
        loss,
        optimizer=lambda params: torch.optim.RMSprop(params, lr=1e-3, eps=1e-5),
        batch_size=16,
        shards=2,
    )
    trainer.fit(Noisy(), epochs=3, shuffle=False)
    return trainer.model


if __name__ == "__main__":
    ported()
