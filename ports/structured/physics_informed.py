"""Physics-informed network: Burgers' equation, derivatives of the network in the loss."""

import math

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import quorate


def places() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.rand(128, 1, generator=generator), torch.linspace(-1, 1, 128)[:, None]
    )


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)
    )


def derivative(of, by):
    return torch.autograd.grad(of.sum(), by, create_graph=True)[0]


def residuals(model, t, x):
    t, x = t.clone().requires_grad_(), x.clone().requires_grad_()
    u = model(torch.cat([t, x], 1))
    u_x = derivative(u, x)
    equation = derivative(u, t) + u * u_x - 0.01 / math.pi * derivative(u_x, x)
    start = model(torch.cat([torch.zeros_like(t), x], 1)) + (math.pi * x).sin()
    return equation.square().mean() + start.square().mean()


def plain() -> nn.Module:
    model = network()
    optimizer = torch.optim.NAdam(model.parameters(), lr=1e-3, eps=1e-5)
    loader = DataLoader(places(), batch_size=32)
    for _ in range(3):
        for t, x in loader:
            loss = residuals(model, t, x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


def accelerated() -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = network()
    optimizer = torch.optim.NAdam(model.parameters(), lr=1e-3, eps=1e-5)
    loader = DataLoader(places(), batch_size=32)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(3):
        for t, x in loader:
            loss = residuals(model, t, x)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
    return accelerator.unwrap_model(model)


def ported() -> nn.Module:
    trainer = quorate.Trainer(
        network(),
        lambda model, batch: residuals(model, *batch),
        optimizer=lambda params: torch.optim.NAdam(params, lr=1e-3, eps=1e-5),
        batch_size=32,
        shards=2,
    )
    trainer.fit(places(), epochs=3, shuffle=False)
    return trainer.model


if __name__ == "__main__":
    ported()
