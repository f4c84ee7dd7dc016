"""A temperature that falls from update to update: an attribute of the model."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import quorate


def rows() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(64, 12, generator=generator)
    return TensorDataset(values, torch.randint(3, (64,), generator=generator))


class Soft(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.choose, self.head = nn.Linear(12, 8), nn.Linear(8, 3)
        self.temperature = 2.0

    def forward(self, values):
        return self.head((self.choose(values) / self.temperature).softmax(1))


def plain() -> nn.Module:
    torch.manual_seed(0)
    model = Soft()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = DataLoader(rows(), batch_size=16)
    for _ in range(3):
        for values, labels in loader:
            loss = F.cross_entropy(model(values), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            model.temperature *= 0.9
    return model


def accelerated() -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = Soft()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = DataLoader(rows(), batch_size=16)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(3):
        for values, labels in loader:
            loss = F.cross_entropy(model(values), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            model.temperature *= 0.9
    return accelerator.unwrap_model(model)


def ported() -> nn.Module:
    class Cool(quorate.Callback):
        def started(self, trainer):
            self.model = trainer.model

        def updated(self, _):
            self.model.temperature *= 0.9

    def loss(model, batch):
        values, labels = batch
        return F.cross_entropy(model(values), labels)

    torch.manual_seed(0)
    model = Soft()
    trainer = quorate.Trainer(
        model,
        loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.5),
        batch_size=16,
        shards=2,
    )
    trainer.fit(rows(), epochs=3, shuffle=False, callbacks=[Cool()])
    return trainer.model


if __name__ == "__main__":
    ported()
