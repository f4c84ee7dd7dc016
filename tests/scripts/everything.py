"""A script with everything that could make a result depend on the computing worker.

    quorate run --devices cpu --workers 3 --shards 4 --run-dir RUN tests/scripts/everything.py

Convolution, BatchNorm, dropout, an LSTM with dropout, an embedding, Adam, clipping, averaged
weights, a schedule, an uneven last batch, weights other than row counts, and random
augmentation from torch's, NumPy's and Python's generators.
"""

import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import quorate


class Sentences(Dataset[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]):
    """Small images with a sentence of up to 12 tokens each; token 0 is padding."""

    def __init__(self, rows: int) -> None:
        generator = torch.Generator().manual_seed(5)
        self.images = torch.randn(rows, 1, 8, 8, generator=generator)
        self.tokens = torch.randint(1, 30, (rows, 12), generator=generator)
        for row in range(rows):
            self.tokens[row, 2 + row % 11 :] = 0
        self.labels = (self.images.mean((1, 2, 3)) > 0).long()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        image = self.images[row] + 0.1 * torch.randn(1, 8, 8)  # torch's default generator
        if random.random() < 0.5:
            image = image.flip(-1)
        image = image * np.random.uniform(0.9, 1.1)
        return image.float(), self.tokens[row], self.labels[row]


class Everything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.embedding = nn.Embedding(30, 12, padding_idx=0)
        self.lstm = nn.LSTM(12, 16, num_layers=2, dropout=0.3, batch_first=True)
        self.dropout = nn.Dropout(0.4)
        self.classes = nn.Linear(4 * 16 + 16, 2)
        self.words = nn.Linear(16, 30)
        self.unused = nn.Linear(3, 3)

    def forward(self, image: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        seen = F.max_pool2d(F.relu(self.norm(self.convolution(image))), 2).flatten(1)
        states, _ = self.lstm(self.embedding(tokens))
        features = self.dropout(torch.cat([seen, states.mean(1)], 1))
        return self.classes(features), self.words(states)


def loss(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    images, tokens, labels = batch
    logits, words = model(images, tokens)
    following = tokens.roll(-1, 1)
    real = following != 0
    weight = real.sum()
    of_words = F.cross_entropy(words[real], following[real])
    return {
        "loss": of_words + F.cross_entropy(logits, labels),
        "accuracy": (logits.argmax(1) == labels).float().mean(),
        "weight": weight,
    }


if __name__ == "__main__":
    torch.manual_seed(3)
    trainer = quorate.Trainer(
        Everything(),
        loss,
        optimizer=quorate.Optimize(
            lambda params: torch.optim.Adam(params, lr=3e-3),
            clip_norm=1.0,
            ema_decay=0.99,
            schedule=lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, 20),
        ),
        batch_size=24,
        shards=4,
    )
    trainer.fit(Sentences(110), epochs=3, validation=Sentences(37))
