"""Gradual unfreezing: the first layer is trained from the second epoch on."""

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
    loader = DataLoader(rows(), batch_size=16)
    model[0].requires_grad_(False)
    for epoch in range(3):
        if epoch == 1:
            model[0].requires_grad_(True)
        for values, labels in loader:
            loss = F.cross_entropy(model(values), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


def accelerated() -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(rows(), batch_size=16)
    model[0].requires_grad_(False)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(3):
        if epoch == 1:
            model[0].requires_grad_(True)
        for values, labels in loader:
            loss = F.cross_entropy(model(values), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
    return accelerator.unwrap_model(model)


def ported() -> nn.Module:
    class Unfreeze(quorate.Callback):
        def started(self, trainer):
            self.model = trainer.model
            self.model[0].requires_grad_(trainer.global_step >= 4)

        def updated(self, report):
            if report.global_step == 4:
                self.model[0].requires_grad_(True)

    def loss(model, batch):
        values, labels = batch
        return F.cross_entropy(model(values), labels)

    trainer = quorate.Trainer(
        network(),
        loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
        batch_size=16,
        shards=2,
    )
    trainer.fit(rows(), epochs=3, shuffle=False, callbacks=[Unfreeze()])
    return trainer.model


if __name__ == "__main__":
    ported()
