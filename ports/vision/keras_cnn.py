"""A Keras 3 model on the torch backend, trained by a custom loop.

Processes alone: a deep copy of a Keras model has different parameters, and each tower has a copy.
"""

import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import quorate


def pictures() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(64, 12, 12, 1, generator=generator)
    return TensorDataset(images, torch.randint(3, (64,), generator=generator))


def network() -> nn.Module:
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.layers.Input((12, 12, 1)),
            keras.layers.Conv2D(8, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(3),
        ]
    )


def plain() -> nn.Module:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(pictures(), batch_size=16)
    for _ in range(2):
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


def accelerated() -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(pictures(), batch_size=16)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(2):
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
    return accelerator.unwrap_model(model)


def ported() -> nn.Module:
    def loss(model, batch):
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    trainer = quorate.Trainer(
        network(),
        loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05),
        batch_size=16,
        shards=2,
    )
    trainer.fit(pictures(), epochs=2, shuffle=False)
    return trainer.model


if __name__ == "__main__":
    ported()
