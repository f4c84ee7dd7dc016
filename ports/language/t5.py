"""Translation: T5 of transformers, targets padded with -100 by a collate function.

Targets have unequal lengths, so the loss returns the number of target tokens as weight.
"""

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset
from transformers import T5Config, T5ForConditionalGeneration

import quorate


class Pairs(Dataset):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, row: int):
        generator = torch.Generator().manual_seed(row)
        source = torch.randint(2, 60, (4 + row % 6,), generator=generator)
        return source, source.flip(0)[: 3 + row % 4]


def padded(samples):
    sources, targets = zip(*samples, strict=True)
    words = pad_sequence(sources, batch_first=True)
    labels = pad_sequence(targets, batch_first=True, padding_value=-100)
    return {"input_ids": words, "attention_mask": (words != 0).long(), "labels": labels}


def network() -> nn.Module:
    torch.manual_seed(0)
    size = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2}
    config = T5Config(vocab_size=60, dropout_rate=0.0, decoder_start_token_id=0, **size)
    return T5ForConditionalGeneration(config)


def plain() -> nn.Module:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    loader = DataLoader(Pairs(), batch_size=8, collate_fn=padded)
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
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    loader = DataLoader(Pairs(), batch_size=8, collate_fn=padded)
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
        optimizer=lambda params: torch.optim.SGD(params, lr=0.02),
        batch_size=8,
        shards=2,
        loading=quorate.Loading(collate=padded),
    )
    trainer.fit(Pairs(), epochs=3, shuffle=False)
    return trainer.model


if __name__ == "__main__":
    ported()
