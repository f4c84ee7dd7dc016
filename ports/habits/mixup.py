"""Mixup: in the collate function, and as an augmentation with keyed draws; label smoothing.

Not compared: a plain loop draws different mixtures.
"""

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


def mixed(samples):
    values, labels = torch.utils.data.default_collate(samples)
    labels = F.one_hot(labels, 3).float()
    share = torch.distributions.Beta(0.4, 0.4).sample()
    order = torch.randperm(len(values))
    return values.lerp(values[order], share), labels.lerp(labels[order], share)


def plain() -> nn.Module:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(rows(), batch_size=16, collate_fn=mixed)
    for _ in range(3):
        for values, targets in loader:
            loss = F.cross_entropy(model(values), targets, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


def accelerated() -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(rows(), batch_size=16, collate_fn=mixed)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(3):
        for values, targets in loader:
            loss = F.cross_entropy(model(values), targets, label_smoothing=0.1)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
    return accelerator.unwrap_model(model)


def ported() -> nn.Module:
    def mixed(batch, draws):
        values, labels = batch
        labels = F.one_hot(labels, 3).float()
        share = draws.uniform(low=0.5)  # (B, 1): each row draws its own
        return values.lerp(values.flip(0), 1 - share), labels.lerp(labels.flip(0), 1 - share)

    def loss(model, batch):
        values, targets = batch
        return F.cross_entropy(model(values), targets, label_smoothing=0.1)

    trainer = quorate.Trainer(
        network(),
        loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
        batch_size=16,
        shards=2,
        loading=quorate.Loading(augment=mixed),
    )
    trainer.fit(rows(), epochs=3, shuffle=False)
    return trainer.model


if __name__ == "__main__":
    ported()
