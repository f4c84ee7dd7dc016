"""Digits that follow from the two before, with quorate.

quorate run --devices cpu --workers 2 hf_trainer_ours.py
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import quorate


class Digits(Dataset[dict[str, torch.Tensor]]):
    """Rows of 4 to 11 digits: two at random; each that follows is the larger of two, plus 1."""

    def __init__(self, rows: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.starts = torch.randint(10, (rows, 2), generator=generator).tolist()
        self.lengths = torch.randint(4, 12, (rows,), generator=generator).tolist()

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        digits = list(self.starts[row])
        while len(digits) <= self.lengths[row]:
            digits.append((max(digits[-2:]) + 1) % 10)
        return {"input_ids": torch.tensor(digits[:-1]), "labels": torch.tensor(digits[1:])}


def pad(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    def padded(name: str, value: int) -> torch.Tensor:
        return nn.utils.rnn.pad_sequence([row[name] for row in rows], True, value)

    return {"input_ids": padded("input_ids", 0), "labels": padded("labels", -100)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.digits, self.places = nn.Embedding(10, 32), nn.Embedding(12, 32)
        layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.logits = nn.Linear(32, 10)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        length = input_ids.shape[1]
        states = self.digits(input_ids) + self.places.weight[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=states.device)
        logits = self.logits(self.layers(states, mask, is_causal=True))
        return {"loss": F.cross_entropy(logits.transpose(1, 2), labels), "logits": logits}


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    outputs, labels = model(**batch), batch["labels"]
    is_token = labels != -100
    right = outputs["logits"].argmax(-1) == labels
    return {
        "loss": outputs["loss"],  # the mean over the shard's tokens
        "accuracy": right[is_token].float().mean(),
        "weight": is_token.sum(),  # how many they are
    }


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    updates = 4 * trainer.updates_per_epoch(train)
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda n: min(n / 20, (updates - n) / (updates - 20))
    )


train = Digits(2000, seed=0)
trainer = quorate.Trainer(
    Net,
    loss,
    optimizer=quorate.Optimize(
        lambda params: torch.optim.AdamW(params, lr=3e-3, weight_decay=0.01),
        schedule=schedule,
        clip_norm=1.0,
    ),
    batch_size=64,  # 2 processes x 2 accumulated x 16
    shards=4,
    loading=quorate.Loading(collate=pad),
    run_dir="runs/digits",
)
trainer.fit(
    train, epochs=4, validation=quorate.Validation(Digits(501, seed=1), best="max:accuracy")
)
