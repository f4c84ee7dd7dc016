"""Image classifier: EfficientNet of timm with BatchNorm, drop path and dropout, RMSprop.

Not compared: a plain loop draws different dropout masks.
"""

import timm
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import quorate


def pictures() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(64, 3, 32, 32, generator=generator)
    return TensorDataset(images, torch.randint(4, (64,), generator=generator))


def network() -> nn.Module:
    torch.manual_seed(0)
    rates = {"drop_rate": 0.2, "drop_path_rate": 0.2}
    return timm.create_model("test_efficientnet", num_classes=4, **rates)


def plain() -> nn.Module:
    model = network()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
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
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
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
        optimizer=lambda params: torch.optim.RMSprop(params, lr=1e-3),
        batch_size=16,
        shards=2,
    )
    trainer.fit(pictures(), epochs=2, shuffle=False)
    return trainer.model


if __name__ == "__main__":
    ported()
