"""Gaussian process of gpytorch: the marginal likelihood of all rows, one batch per epoch.

The likelihood needs all rows at once, so shards=1; a second worker is a substitute.
"""

import gpytorch
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import quorate


def curve() -> TensorDataset:
    x = torch.linspace(0, 1, 40)
    return TensorDataset(x, (6 * x).sin())


class Process(gpytorch.models.ExactGP):
    def __init__(self, x, y) -> None:
        super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood())
        self.mean = gpytorch.means.ConstantMean()
        self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))


def plain() -> nn.Module:
    model = Process(*curve().tensors)
    evidence = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    loader = DataLoader(curve(), batch_size=40)
    for _ in range(10):
        for x, y in loader:
            loss = -evidence(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


def accelerated() -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = Process(*curve().tensors)
    evidence = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    loader = DataLoader(curve(), batch_size=40)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(10):
        for x, y in loader:
            loss = -evidence(model(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
    return accelerator.unwrap_model(model)


def ported() -> nn.Module:
    def loss(model, batch):
        x, y = batch
        evidence = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
        return -evidence(model(x), y)

    trainer = quorate.Trainer(
        Process(*curve().tensors),
        loss,
        optimizer=lambda params: torch.optim.Adam(params, lr=0.02),
        batch_size=40,
        shards=1,
    )
    trainer.fit(curve(), epochs=10, shuffle=False)
    return trainer.model


if __name__ == "__main__":
    ported()
