"""Score matching: the loss takes the gradient of an energy, and the divergence of the gradient."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import quorate


def points() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(64, 2, generator=generator) @ torch.tensor([[2.0, 1], [0, 1]]))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 16), nn.Softplus(), nn.Linear(16, 1))


def hyvarinen(model, points):
    points = points.clone().requires_grad_()
    (score,) = torch.autograd.grad(-model(points).sum(), points, create_graph=True)
    trace = 0
    for axis in range(2):
        (row,) = torch.autograd.grad(score[:, axis].sum(), points, create_graph=True)
        trace = trace + row[:, axis]
    return (trace + 0.5 * score.square().sum(1)).mean()


def plain() -> nn.Module:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(points(), batch_size=16)
    for _ in range(3):
        for (rows,) in loader:
            loss = hyvarinen(model, rows)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


def accelerated() -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(points(), batch_size=16)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(3):
        for (rows,) in loader:
            loss = hyvarinen(model, rows)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
    return accelerator.unwrap_model(model)


def ported() -> nn.Module:
    trainer = quorate.Trainer(
        network(),
        lambda model, batch: hyvarinen(model, *batch),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05),
        batch_size=16,
        shards=2,
    )
    trainer.fit(points(), epochs=3, shuffle=False)
    return trainer.model


if __name__ == "__main__":
    ported()
