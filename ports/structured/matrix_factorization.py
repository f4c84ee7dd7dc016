"""Recommendation: matrix factorization with biases, Adagrad."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import quorate


def ratings() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    users = torch.randint(40, (256,), generator=generator)
    items = torch.randint(60, (256,), generator=generator)
    return TensorDataset(users, items, 5 * torch.rand(256, generator=generator))


class Factors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(40, 8), nn.Embedding(60, 8)
        self.user_bias, self.item_bias = nn.Embedding(40, 1), nn.Embedding(60, 1)

    def forward(self, users, items):
        found = (self.users(users) * self.items(items)).sum(1)
        return found + self.user_bias(users).squeeze(1) + self.item_bias(items).squeeze(1)


def plain() -> nn.Module:
    torch.manual_seed(0)
    model = Factors()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05, eps=1e-5)
    loader = DataLoader(ratings(), batch_size=64)
    for _ in range(3):
        for users, items, stars in loader:
            loss = F.mse_loss(model(users, items), stars)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


def accelerated() -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = Factors()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05, eps=1e-5)
    loader = DataLoader(ratings(), batch_size=64)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(3):
        for users, items, stars in loader:
            loss = F.mse_loss(model(users, items), stars)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
    return accelerator.unwrap_model(model)


def ported() -> nn.Module:
    def loss(model, batch):
        users, items, stars = batch
        return F.mse_loss(model(users, items), stars)

    torch.manual_seed(0)
    model = Factors()
    trainer = quorate.Trainer(
        model,
        loss,
        optimizer=lambda params: torch.optim.Adagrad(params, lr=0.05, eps=1e-5),
        batch_size=64,
        shards=2,
    )
    trainer.fit(ratings(), epochs=3, shuffle=False)
    return trainer.model


if __name__ == "__main__":
    ported()
