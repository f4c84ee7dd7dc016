"""L-BFGS, whose step takes a closure and wants several gradients."""

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
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    loader = DataLoader(rows(), batch_size=64)
    for _ in range(3):
        for values, labels in loader:

            def closure(values=values, labels=labels):
                loss = F.cross_entropy(model(values), labels)
                optimizer.zero_grad()
                loss.backward()
                return loss

            optimizer.step(closure)
    return model


def accelerated() -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    loader = DataLoader(rows(), batch_size=64)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(3):
        for values, labels in loader:

            def closure(values=values, labels=labels):
                loss = F.cross_entropy(model(values), labels)
                optimizer.zero_grad()
                accelerator.backward(loss)
                return loss

            optimizer.step(closure)
    return accelerator.unwrap_model(model)


def ported() -> nn.Module:
    def loss(model, batch):
        values, labels = batch
        return F.cross_entropy(model(values), labels)

    trainer = quorate.Trainer(
        network(),
        loss,
        optimizer=lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=3),
        batch_size=64,
        shards=2,
    )
    trainer.fit(rows(), epochs=3, shuffle=False)
    return trainer.model


if __name__ == "__main__":
    ported()
