"""Image classifier: ConvNeXt of timm, a cosine schedule with warm-up, clipping, validation."""

import math

import timm
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import quorate


def pictures(seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(48, 3, 32, 32, generator=generator)
    return TensorDataset(images, torch.randint(4, (48,), generator=generator))


def network() -> nn.Module:
    torch.manual_seed(0)
    return timm.models.ConvNeXt(num_classes=4, depths=(1, 1, 1, 1), dims=(8, 16, 24, 32))


def warm_up_then_cosine(update: int) -> float:
    return update / 3 if update < 3 else 0.5 + 0.5 * math.cos(math.pi * (update - 3) / 6)


def plain() -> nn.Module:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up_then_cosine)
    loader = DataLoader(pictures(1), batch_size=16)
    test_loader = DataLoader(pictures(2), batch_size=16)
    for epoch in range(3):
        model.train()
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        model.eval()
        right = 0
        with torch.no_grad():
            for images, labels in test_loader:
                right += (model(images).argmax(1) == labels).sum().item()
        print(f"epoch {epoch + 1}: accuracy {right / len(test_loader.dataset):.4f}")
    return model


def accelerated() -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up_then_cosine)
    loader = DataLoader(pictures(1), batch_size=16)
    test_loader = DataLoader(pictures(2), batch_size=16)
    model, optimizer, loader, test_loader, schedule = accelerator.prepare(
        model, optimizer, loader, test_loader, schedule
    )
    for epoch in range(3):
        model.train()
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        model.eval()
        right = 0
        with torch.no_grad():
            for images, labels in test_loader:
                right += (model(images).argmax(1) == labels).sum().item()
        accelerator.print(f"epoch {epoch + 1}: accuracy {right / len(test_loader.dataset):.4f}")
    return accelerator.unwrap_model(model)


def ported() -> nn.Module:
    def loss(model, batch):
        images, labels = batch
        logits = model(images)
        accuracy = (logits.argmax(1) == labels).float().mean()
        return {"loss": F.cross_entropy(logits, labels), "accuracy": accuracy}

    trainer = quorate.Trainer(
        network(),
        loss,
        optimizer=quorate.Optimize(
            lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
            schedule=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
                optimizer, warm_up_then_cosine
            ),
            clip_norm=1.0,
        ),
        batch_size=16,
        shards=2,
    )
    trainer.fit(pictures(1), epochs=3, validation=pictures(2), shuffle=False)
    return trainer.model


if __name__ == "__main__":
    ported()
