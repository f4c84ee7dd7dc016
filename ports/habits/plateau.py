"""ReduceLROnPlateau by the loss of the validation set."""

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
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.05)
    loader = DataLoader(rows(), batch_size=16)
    test_loader = DataLoader(rows(), batch_size=64)
    for _ in range(6):
        model.train()
        for values, labels in loader:
            loss = F.cross_entropy(model(values), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            found = sum(F.cross_entropy(model(values), labels) for values, labels in test_loader)
        schedule.step(found)
    return model


def accelerated() -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.05)
    loader = DataLoader(rows(), batch_size=16)
    test_loader = DataLoader(rows(), batch_size=64)
    model, optimizer, loader, test_loader, schedule = accelerator.prepare(
        model, optimizer, loader, test_loader, schedule
    )
    for _ in range(6):
        model.train()
        for values, labels in loader:
            loss = F.cross_entropy(model(values), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
        model.eval()
        with torch.no_grad():
            found = sum(F.cross_entropy(model(values), labels) for values, labels in test_loader)
        schedule.step(found)
    return accelerator.unwrap_model(model)


def ported() -> nn.Module:
    def loss(model, batch):
        values, labels = batch
        return F.cross_entropy(model(values), labels)

    def schedule(optimizer):
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.05)

    trainer = quorate.Trainer(
        network(),
        loss,
        optimizer=quorate.Optimize(
            lambda params: torch.optim.SGD(params, lr=0.5),
            schedule=schedule,
            schedule_metric="validation/loss",
        ),
        batch_size=16,
        shards=2,
    )
    trainer.fit(rows(), epochs=6, validation=rows(), shuffle=False)
    return trainer.model


if __name__ == "__main__":
    ported()
