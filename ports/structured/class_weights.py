"""Tabular data of scikit-learn, class weights in the loss: a weighted mean.

The mean is weighted by the rows' classes, so the loss returns the sum of these weights as weight.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import quorate

WEIGHTS = torch.tensor([2.0, 0.7])


def patients() -> TensorDataset:
    found = load_breast_cancer()
    values = torch.tensor(found.data[:200], dtype=torch.float32)
    values = (values - values.mean(0)) / values.std(0)
    return TensorDataset(values, torch.tensor(found.target[:200]))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(30, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 2))


def plain() -> nn.Module:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(patients(), batch_size=32)
    for _ in range(3):
        for values, labels in loader:
            loss = F.cross_entropy(model(values), labels, WEIGHTS)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


def accelerated() -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(patients(), batch_size=32)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(3):
        for values, labels in loader:
            loss = F.cross_entropy(model(values), labels, WEIGHTS)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
    return accelerator.unwrap_model(model)


def ported() -> nn.Module:
    def loss(model, batch):
        values, labels = batch
        found = F.cross_entropy(model(values), labels, WEIGHTS)
        return {"loss": found, "weight": WEIGHTS[labels].sum()}

    trainer = quorate.Trainer(
        network(),
        loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
        batch_size=32,
        shards=2,
    )
    trainer.fit(patients(), epochs=3, shuffle=False)
    return trainer.model


if __name__ == "__main__":
    ported()
