"""Segmentation: an encoder and decoder with skips, cross-entropy plus soft dice per image."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import quorate


class Discs(Dataset):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, row: int):
        generator = torch.Generator().manual_seed(row)
        centre = torch.randint(4, 12, (2, 1, 1), generator=generator)
        places = torch.stack(torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij"))
        mask = ((places - centre).square().sum(0) < 12).float()[None]
        return mask + 0.3 * torch.randn(1, 16, 16, generator=generator), mask


class SmallUNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU())
        self.middle = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU())
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.head = nn.Conv2d(16, 1, 1)

    def forward(self, images):
        skipped = self.down(images)
        return self.head(torch.cat([self.up(self.middle(skipped)), skipped], 1))


def dice(logits, masks):
    chances = logits.sigmoid()
    both = (chances * masks).sum((1, 2, 3))
    return (1 - (2 * both + 1) / (chances.sum((1, 2, 3)) + masks.sum((1, 2, 3)) + 1)).mean()


def plain() -> nn.Module:
    torch.manual_seed(0)
    model = SmallUNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-6)
    loader = DataLoader(Discs(), batch_size=16)
    for _ in range(3):
        for images, masks in loader:
            logits = model(images)
            loss = F.binary_cross_entropy_with_logits(logits, masks) + dice(logits, masks)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


def accelerated() -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = SmallUNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-6)
    loader = DataLoader(Discs(), batch_size=16)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(3):
        for images, masks in loader:
            logits = model(images)
            loss = F.binary_cross_entropy_with_logits(logits, masks) + dice(logits, masks)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
    return accelerator.unwrap_model(model)


def ported() -> nn.Module:
    def loss(model, batch):
        images, masks = batch
        logits = model(images)
        return F.binary_cross_entropy_with_logits(logits, masks) + dice(logits, masks)

    torch.manual_seed(0)
    model = SmallUNet()
    trainer = quorate.Trainer(
        model,
        loss,
        optimizer=lambda params: torch.optim.Adam(params, lr=1e-3, eps=1e-6),
        batch_size=16,
        shards=2,
    )
    trainer.fit(Discs(), epochs=3, shuffle=False)
    return trainer.model


if __name__ == "__main__":
    ported()
