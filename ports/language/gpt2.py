"""Language model: GPT-2 of transformers on padded texts, the mean over tokens.

Texts have unequal lengths, so the loss returns the number of predicted tokens as weight.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel

import quorate


class Texts(Dataset):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, row: int):
        generator = torch.Generator().manual_seed(row)
        length = 6 + row % 10
        words = torch.randint(1, 80, (16,), generator=generator)
        inside = torch.arange(16) < length
        return {
            "input_ids": words * inside,
            "attention_mask": inside.long(),
            "labels": words.masked_fill(~inside, -100),
        }


def network() -> nn.Module:
    torch.manual_seed(0)
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(vocab_size=80, n_positions=16, n_embd=32, n_layer=2, n_head=2, **still)
    return GPT2LMHeadModel(config)


def plain() -> nn.Module:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(Texts(), batch_size=16)
    for _ in range(3):
        for batch in loader:
            loss = model(**batch).loss
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return model


def accelerated() -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(Texts(), batch_size=16)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(3):
        for batch in loader:
            loss = model(**batch).loss
            optimizer.zero_grad()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return accelerator.unwrap_model(model)


def ported() -> nn.Module:
    def loss(model, batch):
        predicted = (batch["labels"][:, 1:] != -100).sum()
        return {"loss": model(**batch).loss, "weight": predicted}

    trainer = quorate.Trainer(
        network(),
        loss,
        optimizer=quorate.Optimize(
            lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), clip_norm=1.0
        ),
        batch_size=16,
        shards=2,
    )
    trainer.fit(Texts(), epochs=3, shuffle=False)
    return trainer.model


if __name__ == "__main__":
    ported()
