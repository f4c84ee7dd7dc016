"""Augmentation of whole batches by kornia, inside the step.

Not compared: a plain loop draws different augmentations.
"""

import kornia.augmentation as K
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import quorate


def pictures() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(64, 3, 16, 16, generator=generator)
    return TensorDataset(images, torch.randint(4, (64,), generator=generator))


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4))


def made() -> nn.Module:
    torch.manual_seed(0)
    model = network()
    model(torch.zeros(1, 3, 16, 16))  # gives the lazy layer its shape
    return model


augment = nn.Sequential(K.RandomHorizontalFlip(), K.ColorJitter(0.2, 0.2, 0.2), K.RandomErasing())


def plain() -> nn.Module:
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(pictures(), batch_size=16)
    for _ in range(2):
        for images, labels in loader:
            loss = F.cross_entropy(model(augment(images)), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


def accelerated() -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(pictures(), batch_size=16)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(2):
        for images, labels in loader:
            loss = F.cross_entropy(model(augment(images)), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
    return accelerator.unwrap_model(model)


def ported() -> nn.Module:
    def loss(model, batch):
        images, labels = batch
        return F.cross_entropy(model(augment(images)), labels)

    trainer = quorate.Trainer(
        made(),
        loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05),
        batch_size=16,
        shards=2,
    )
    trainer.fit(pictures(), epochs=2, shuffle=False)
    return trainer.model


if __name__ == "__main__":
    ported()
