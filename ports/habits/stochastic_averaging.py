"""Stochastic weight averaging: torch's AveragedModel, fed after each epoch.

The averages are compared.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel
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
    averaged = AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(rows(), batch_size=16)
    for _ in range(3):
        for values, labels in loader:
            loss = F.cross_entropy(model(values), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        averaged.update_parameters(model)
    return averaged


def accelerated() -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = network()
    averaged = AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(rows(), batch_size=16)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(3):
        for values, labels in loader:
            loss = F.cross_entropy(model(values), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
        averaged.update_parameters(model)
    return averaged


def ported() -> nn.Module:
    class Average(quorate.Callback):
        def started(self, trainer):
            self.model, self.averaged = trainer.model, AveragedModel(trainer.model)

        def updated(self, report):
            if report.global_step % 4 == 0:
                self.averaged.update_parameters(self.model)

    def loss(model, batch):
        values, labels = batch
        return F.cross_entropy(model(values), labels)

    averages = Average()
    trainer = quorate.Trainer(
        network(),
        loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05),
        batch_size=16,
        shards=2,
    )
    trainer.fit(rows(), epochs=3, shuffle=False, callbacks=[averages])
    return averages.averaged


if __name__ == "__main__":
    ported()
