"""An embedding with sparse gradients, SparseAdam."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import quorate


def rows() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(64, 12, generator=generator)
    return TensorDataset(values, torch.randint(3, (64,), generator=generator))


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(100, 3, sparse=True)

    def forward(self, values):
        return self.words((values * 10).long() % 100)


def plain() -> nn.Module:
    torch.manual_seed(0)
    model = Bag()
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.01)
    loader = DataLoader(rows(), batch_size=16)
    for _ in range(3):
        for values, labels in loader:
            loss = F.cross_entropy(model(values), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


def accelerated() -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = Bag()
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.01)
    loader = DataLoader(rows(), batch_size=16)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(3):
        for values, labels in loader:
            loss = F.cross_entropy(model(values), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
    return accelerator.unwrap_model(model)


def ported() -> nn.Module:
    def loss(model, batch):
        values, labels = batch
        return F.cross_entropy(model(values), labels)

    torch.manual_seed(0)
    model = Bag()
    trainer = quorate.Trainer(
        model,
        loss,
        optimizer=lambda params: torch.optim.SparseAdam(params, lr=0.01),
        batch_size=16,
        shards=2,
    )
    trainer.fit(rows(), epochs=3, shuffle=False)
    return trainer.model


if __name__ == "__main__":
    ported()
