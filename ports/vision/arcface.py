"""Metric learning with a loss that has parameters: ArcFace of pytorch-metric-learning.

Network and loss become one model, so one optimizer trains both.
"""

import torch
from pytorch_metric_learning.losses import ArcFaceLoss
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import quorate


def faces() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(64, 24, generator=generator)
    return TensorDataset(images, torch.randint(5, (64,), generator=generator))


def plain() -> nn.Module:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 8))
    criterion = ArcFaceLoss(num_classes=5, embedding_size=8)
    parameters = [*network.parameters(), *criterion.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.01)
    loader = DataLoader(faces(), batch_size=16)
    for _ in range(3):
        for images, labels in loader:
            loss = criterion(network(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return nn.ModuleDict({"network": network, "criterion": criterion})


def accelerated() -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 8))
    criterion = ArcFaceLoss(num_classes=5, embedding_size=8)
    parameters = [*network.parameters(), *criterion.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.01)
    loader = DataLoader(faces(), batch_size=16)
    network, criterion, optimizer, loader = accelerator.prepare(
        network, criterion, optimizer, loader
    )
    for _ in range(3):
        for images, labels in loader:
            loss = criterion(network(images), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
    return nn.ModuleDict({"network": network, "criterion": criterion})


def ported() -> nn.Module:
    def loss(model, batch):
        images, labels = batch
        return model["criterion"](model["network"](images), labels)

    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 8))
    criterion = ArcFaceLoss(num_classes=5, embedding_size=8)
    trainer = quorate.Trainer(
        nn.ModuleDict({"network": network, "criterion": criterion}),
        loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
        batch_size=16,
        shards=2,
    )
    trainer.fit(faces(), epochs=3, shuffle=False)
    return trainer.model


if __name__ == "__main__":
    ported()
