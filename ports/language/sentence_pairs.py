"""Sentence embeddings: a model of sentence-transformers, trained on the likeness of pairs."""

import torch
import torch.nn.functional as F
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import StaticEmbedding
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import nn
from torch.utils.data import DataLoader, Dataset

import quorate

WORDS = "the a cat dog sits runs on under mat tree fast slow red green".split()  # noqa: SIM905


class Pairs(Dataset):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, row: int):
        one = " ".join(WORDS[(row * step) % 14] for step in (1, 2, 3, 5))
        other = " ".join(WORDS[(row * step) % 14] for step in (1, 2, 7, 11))
        return one, other, row % 4 / 4


def network() -> nn.Module:
    torch.manual_seed(0)
    words = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, WORDS[0]))
    words.pre_tokenizer = Whitespace()
    return SentenceTransformer(modules=[StaticEmbedding(words, embedding_dim=16)], device="cpu")


def plain() -> nn.Module:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Pairs(), batch_size=16)
    for _ in range(3):
        for one, other, likeness in loader:
            first = model(model.tokenize(list(one)))["sentence_embedding"]
            second = model(model.tokenize(list(other)))["sentence_embedding"]
            loss = F.mse_loss(F.cosine_similarity(first, second), likeness.float())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


def accelerated() -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Pairs(), batch_size=16)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(3):
        for one, other, likeness in loader:
            first = model(model.tokenize(list(one)))["sentence_embedding"]
            second = model(model.tokenize(list(other)))["sentence_embedding"]
            loss = F.mse_loss(F.cosine_similarity(first, second), likeness.float())
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
    return accelerator.unwrap_model(model)


def ported() -> nn.Module:
    def loss(model, batch):
        one, other, likeness = batch
        first = model(model.tokenize(list(one)))["sentence_embedding"]
        second = model(model.tokenize(list(other)))["sentence_embedding"]
        return F.mse_loss(F.cosine_similarity(first, second), likeness.float())

    trainer = quorate.Trainer(
        network(),
        loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        batch_size=16,
        shards=2,
    )
    trainer.fit(Pairs(), epochs=3, shuffle=False)
    return trainer.model


if __name__ == "__main__":
    ported()
