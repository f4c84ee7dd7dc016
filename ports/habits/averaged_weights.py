"""Averaged weights (EMA), with which the validation set is evaluated.

The averages are compared instead of the parameters.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import quorate


def rows() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(64, 12, generator=generator)
    return TensorDataset(values, torch.randint(3, (64,), generator=generator))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 3))


def plain() -> nn.Module:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    averaged = [parameter.detach().clone() for parameter in model.parameters()]
    loader = DataLoader(rows(), batch_size=16)
    updates = 0
    for _ in range(3):
        for values, labels in loader:
            loss = F.cross_entropy(model(values), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            updates += 1
            decay = min(0.99, (1 + updates) / (10 + updates))
            for average, parameter in zip(averaged, model.parameters(), strict=True):
                average.lerp_(parameter.detach(), 1 - decay)
    model.load_state_dict(dict(zip(model.state_dict(), averaged, strict=True)))
    return model


def accelerated() -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    averaged = [parameter.detach().clone() for parameter in model.parameters()]
    loader = DataLoader(rows(), batch_size=16)
    updates = 0
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(3):
        for values, labels in loader:
            loss = F.cross_entropy(model(values), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            updates += 1
            decay = min(0.99, (1 + updates) / (10 + updates))
            for average, parameter in zip(averaged, model.parameters(), strict=True):
                average.lerp_(parameter.detach(), 1 - decay)
    model.load_state_dict(dict(zip(model.state_dict(), averaged, strict=True)))
    return accelerator.unwrap_model(model)


def ported() -> nn.Module:
    def loss(model, batch):
        values, labels = batch
        return F.cross_entropy(model(values), labels)

    trainer = quorate.Trainer(
        network(),
        loss,
        optimizer=quorate.Optimize(
            lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9), ema_decay=0.99
        ),
        batch_size=16,
        shards=2,
    )
    trainer.fit(rows(), epochs=3, shuffle=False)
    return trainer.averaged_model


if __name__ == "__main__":
    ported()
