"""Text classification: BERT of transformers, dicts as batches, a linear schedule.

Transformers return the loss with the logits; the entries of a dict become keyword arguments.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    get_linear_schedule_with_warmup,
)

import quorate

SIZE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


class Sentences(Dataset):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, row: int):
        generator = torch.Generator().manual_seed(row)
        mask = (torch.arange(12) < 5 + row % 8).long()
        words = torch.randint(5, 100, (12,), generator=generator) * mask
        return {"input_ids": words, "attention_mask": mask, "labels": row % 3}


def network() -> nn.Module:
    torch.manual_seed(0)
    config = BertConfig(vocab_size=100, intermediate_size=64, num_labels=3, **SIZE, **STILL)
    return BertForSequenceClassification(config)


def plain() -> nn.Module:
    model = network()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
    schedule = get_linear_schedule_with_warmup(optimizer, 2, 9)
    loader = DataLoader(Sentences(), batch_size=16)
    for _ in range(3):
        for batch in loader:
            loss = model(**batch).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return model


def accelerated() -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = network()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
    schedule = get_linear_schedule_with_warmup(optimizer, 2, 9)
    loader = DataLoader(Sentences(), batch_size=16)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    for _ in range(3):
        for batch in loader:
            loss = model(**batch).loss
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
    return accelerator.unwrap_model(model)


def ported() -> nn.Module:
    trainer = quorate.Trainer(
        network(),
        lambda model, batch: model(**batch),
        optimizer=quorate.Optimize(
            lambda params: torch.optim.AdamW(params, lr=1e-3, eps=1e-6),
            schedule=lambda optimizer: get_linear_schedule_with_warmup(optimizer, 2, 9),
        ),
        batch_size=16,
        shards=2,
    )
    trainer.fit(Sentences(), epochs=3, shuffle=False)
    return trainer.model


if __name__ == "__main__":
    ported()
