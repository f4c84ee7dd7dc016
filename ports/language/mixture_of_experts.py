"""Mixture of experts: top-1 routing with an auxiliary loss that balances the load.

The balance is computed over a shard instead of the batch, as over a device's part elsewhere.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import quorate


def rows() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(64, 16, generator=generator)
    return TensorDataset(values, torch.randint(3, (64,), generator=generator))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 3)

    def forward(self, values):
        chances = self.router(values).softmax(1)
        best, chosen = chances.max(1)
        found = torch.zeros_like(values)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(1)
            if len(rows):
                found = found.index_add(0, rows, expert(values[rows]) * best[rows, None])
        load = F.one_hot(chosen, 4).float().mean(0)
        return self.head(found.relu()), 4 * (load * chances.mean(0)).sum()


def plain() -> nn.Module:
    torch.manual_seed(0)
    model = Experts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(rows(), batch_size=8)
    for _ in range(2):
        for number, (values, labels) in enumerate(loader):
            logits, balance = model(values)
            loss = (F.cross_entropy(logits, labels) + 0.01 * balance) / 2
            loss.backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
    return model


def accelerated() -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = Experts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(rows(), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(2):
        for values, labels in loader:
            with accelerator.accumulate(model):
                logits, balance = model(values)
                loss = F.cross_entropy(logits, labels) + 0.01 * balance
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    return accelerator.unwrap_model(model)


def ported() -> nn.Module:
    def loss(model, batch):
        values, labels = batch
        logits, balance = model(values)
        return F.cross_entropy(logits, labels) + 0.01 * balance

    torch.manual_seed(0)
    model = Experts()
    trainer = quorate.Trainer(
        model,
        loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        batch_size=16,
        shards=2,
    )
    trainer.fit(rows(), epochs=2, shuffle=False)
    return trainer.model


if __name__ == "__main__":
    ported()
