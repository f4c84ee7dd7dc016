"""Contrastive pairs as in CLIP: two encoders, a temperature, each pair against the whole batch.

The loss needs all rows of a batch at once: Gather, with some rows on each worker.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import quorate


def pairs() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(64, 48, generator=generator)
    return TensorDataset(images, torch.randint(50, (64, 6), generator=generator))


class TwoEncoders(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(48, 32), nn.GELU(), nn.Linear(32, 16))
        self.text = nn.EmbeddingBag(50, 16)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, images, words):
        images, texts = F.normalize(self.image(images)), F.normalize(self.text(words))
        return self.scale.exp() * images @ texts.T


def plain() -> nn.Module:
    torch.manual_seed(0)
    model = TwoEncoders()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(pairs(), batch_size=16)
    for _ in range(3):
        for images, words in loader:
            logits = model(images, words)
            own = torch.arange(len(logits))
            loss = (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


def accelerated() -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = TwoEncoders()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(pairs(), batch_size=16)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(3):
        for images, words in loader:
            logits = model(images, words)
            own = torch.arange(len(logits))
            loss = (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
    return accelerator.unwrap_model(model)


def ported() -> nn.Module:
    def represent(model, batch):
        images, words = batch
        return F.normalize(model.image(images)), F.normalize(model.text(words))

    def contrast(model, rows):
        images, texts = rows
        logits = model.scale.exp() * images @ texts.T
        own = torch.arange(len(logits))
        return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2

    torch.manual_seed(0)
    model = TwoEncoders()
    trainer = quorate.Trainer(
        model,
        quorate.Gather(represent, contrast),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
        batch_size=16,
        shards=2,
    )
    trainer.fit(pairs(), epochs=3, shuffle=False)
    return trainer.model


if __name__ == "__main__":
    ported()
