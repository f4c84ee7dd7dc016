"""Image classifier: ResNet of timm, SGD with momentum, accumulation over two halves.

BatchNorm normalises over a shard, like over a part of an accumulated batch.
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


def plain() -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model("test_resnet", num_classes=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    loader = DataLoader(pictures(), batch_size=8)
    for _ in range(2):
        for number, (images, labels) in enumerate(loader):
            loss = F.cross_entropy(model(images), labels) / 2
            loss.backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
    return model


def accelerated() -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = timm.create_model("test_resnet", num_classes=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    loader = DataLoader(pictures(), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(2):
        for images, labels in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    return accelerator.unwrap_model(model)


def ported() -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model("test_resnet", num_classes=4)
    trainer = quorate.Trainer(
        model,
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, weight_decay=1e-4),
        batch_size=16,
        shards=2,
    )
    trainer.fit(pictures(), epochs=2, shuffle=False)
    return trainer.model


if __name__ == "__main__":
    ported()
