"""Language model: a causal transformer of torch with embeddings tied to the output layer."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import quorate


def texts() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randint(60, (48, 13), generator=generator))


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(60, 32)
        self.places = nn.Parameter(torch.zeros(12, 32))
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 60, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words):
        mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1])
        return self.head(self.body(self.words(words) + self.places, mask, is_causal=True))


def plain() -> nn.Module:
    torch.manual_seed(0)
    model = LanguageModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(texts(), batch_size=16)
    for _ in range(3):
        for (words,) in loader:
            logits = model(words[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


def accelerated() -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = LanguageModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(texts(), batch_size=16)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(3):
        for (words,) in loader:
            logits = model(words[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
    return accelerator.unwrap_model(model)


def ported() -> nn.Module:
    def loss(model, batch):
        (words,) = batch
        logits = model(words[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())

    torch.manual_seed(0)
    model = LanguageModel()
    trainer = quorate.Trainer(
        model,
        loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05),
        batch_size=16,
        shards=2,
    )
    trainer.fit(texts(), epochs=3, shuffle=False)
    return trainer.model


if __name__ == "__main__":
    ported()
