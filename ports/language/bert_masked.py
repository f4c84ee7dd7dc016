"""Masked words: BERT for masked language modelling, the mean over masked words.

Rows have unequal numbers of masked words, so the loss returns the number as weight.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForMaskedLM

import quorate

SIZE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


class Masked(Dataset):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, row: int):
        generator = torch.Generator().manual_seed(row)
        words = torch.randint(5, 100, (16,), generator=generator)
        hidden = torch.rand(16, generator=generator) < 0.3
        hidden[row % 16] = True
        return {
            "input_ids": words.masked_fill(hidden, 4),
            "labels": words.masked_fill(~hidden, -100),
        }


def network() -> nn.Module:
    torch.manual_seed(0)
    config = BertConfig(vocab_size=100, intermediate_size=64, **SIZE, **STILL)
    return BertForMaskedLM(config)


def plain() -> nn.Module:
    model = network()
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Masked(), batch_size=16)
    for _ in range(3):
        for batch in loader:
            loss = model(**batch).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


def accelerated() -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = network()
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Masked(), batch_size=16)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(3):
        for batch in loader:
            loss = model(**batch).loss
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
    return accelerator.unwrap_model(model)


def ported() -> nn.Module:
    def loss(model, batch):
        return {"loss": model(**batch).loss, "weight": (batch["labels"] != -100).sum()}

    trainer = quorate.Trainer(
        network(),
        loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        batch_size=16,
        shards=2,
    )
    trainer.fit(Masked(), epochs=3, shuffle=False)
    return trainer.model


if __name__ == "__main__":
    ported()
