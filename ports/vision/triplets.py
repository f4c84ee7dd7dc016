"""Metric learning: triplets as rows, an embedding network, the triplet margin loss."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import quorate


class Triplets(Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, row: int):
        generator = torch.Generator().manual_seed(row)
        anchor = torch.randn(24, generator=generator)
        near = anchor + 0.1 * torch.randn(24, generator=generator)
        return anchor, near, torch.randn(24, generator=generator)


criterion = nn.TripletMarginLoss(margin=1.0)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 8))


def plain() -> nn.Module:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(Triplets(), batch_size=16)
    for _ in range(3):
        for anchor, near, far in loader:
            loss = criterion(model(anchor), model(near), model(far))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


def accelerated() -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(Triplets(), batch_size=16)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(3):
        for anchor, near, far in loader:
            loss = criterion(model(anchor), model(near), model(far))
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
    return accelerator.unwrap_model(model)


def ported() -> nn.Module:
    trainer = quorate.Trainer(
        network(),
        lambda model, batch: criterion(*map(model, batch)),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05),
        batch_size=16,
        shards=2,
    )
    trainer.fit(Triplets(), epochs=3, shuffle=False)
    return trainer.model


if __name__ == "__main__":
    ported()
