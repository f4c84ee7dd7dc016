"""Tagging: a two-way LSTM over packed sequences, padding by a collate function.

Sentences have unequal lengths, so the loss returns the number of words as weight.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset

import quorate


class Sentences(Dataset):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, row: int):
        generator = torch.Generator().manual_seed(row)
        words = torch.randint(1, 50, (3 + row % 9,), generator=generator)
        return words, words % 5


def padded(samples):
    words, tags = zip(*samples, strict=True)
    lengths = torch.tensor([len(sentence) for sentence in words])
    tags = pad_sequence(tags, batch_first=True, padding_value=-1)
    return pad_sequence(words, batch_first=True), lengths, tags


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 16, padding_idx=0)
        self.lstm = nn.LSTM(16, 16, bidirectional=True, batch_first=True)
        self.head = nn.Linear(32, 5)

    def forward(self, words, lengths):
        packed = pack_padded_sequence(
            self.words(words), lengths, batch_first=True, enforce_sorted=False
        )
        return self.head(pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0])


def plain() -> nn.Module:
    torch.manual_seed(0)
    model = Tagger()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-6)
    loader = DataLoader(Sentences(), batch_size=16, collate_fn=padded)
    for _ in range(3):
        for words, lengths, tags in loader:
            logits = model(words, lengths)
            loss = F.cross_entropy(logits.flatten(0, 1), tags.flatten(), ignore_index=-1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


def accelerated() -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = Tagger()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-6)
    loader = DataLoader(Sentences(), batch_size=16, collate_fn=padded)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(3):
        for words, lengths, tags in loader:
            logits = model(words, lengths)
            loss = F.cross_entropy(logits.flatten(0, 1), tags.flatten(), ignore_index=-1)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
    return accelerator.unwrap_model(model)


def ported() -> nn.Module:
    def loss(model, batch):
        words, lengths, tags = batch
        logits = model(words, lengths)
        found = F.cross_entropy(logits.flatten(0, 1), tags.flatten(), ignore_index=-1)
        return {"loss": found, "weight": lengths.sum()}

    torch.manual_seed(0)
    model = Tagger()
    trainer = quorate.Trainer(
        model,
        loss,
        optimizer=lambda params: torch.optim.Adam(params, lr=1e-3, eps=1e-6),
        batch_size=16,
        shards=2,
        loading=quorate.Loading(collate=padded),
    )
    trainer.fit(Sentences(), epochs=3, shuffle=False)
    return trainer.model


if __name__ == "__main__":
    ported()
