"""Sharpness-aware minimisation: an optimizer that takes a closure for the gradient uphill."""

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


class SAM(torch.optim.SGD):
    """SGD with the gradient at a point that lies ``rho`` uphill."""

    rho = 0.05

    def step(self, closure):
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        with torch.enable_grad():
            loss = closure()
        norm = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()
        before = [parameter.detach().clone() for parameter in parameters]
        with torch.no_grad():
            for parameter in parameters:
                parameter.add_(parameter.grad, alpha=self.rho / norm.item())
        with torch.enable_grad():
            closure()
        with torch.no_grad():
            for parameter, old in zip(parameters, before, strict=True):
                parameter.copy_(old)
        super().step()
        return loss


def plain() -> nn.Module:
    model = network()
    optimizer = SAM(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(rows(), batch_size=16)
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
    optimizer = SAM(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(rows(), batch_size=16)
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
        optimizer=lambda params: SAM(params, lr=0.05, momentum=0.9),
        batch_size=16,
        shards=2,
    )
    trainer.fit(rows(), epochs=3, shuffle=False)
    return trainer.model


if __name__ == "__main__":
    ported()
