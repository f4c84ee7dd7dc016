"""A model in the style of Hugging Face's: rows are dicts, and it returns loss and logits at once.

quorate run --devices cpu --workers 2 tests/scripts/hugging_face.py
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import quorate


@dataclass
class Output(OrderedDict[str, torch.Tensor]):
    """As ``transformers.utils.ModelOutput``: a dataclass and a mapping of what is not None."""

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            if (value := getattr(self, field.name)) is not None:
                self[field.name] = value


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16, padding_idx=0)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.classes = nn.Linear(16, 2)

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> Output:
        assert attention_mask is not None
        states = self.encoder(
            self.embedding(input_ids), src_key_padding_mask=attention_mask.logical_not()
        )
        logits = self.classes(states[:, 0])
        return Output(None if labels is None else F.cross_entropy(logits, labels), logits)


class Texts(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, rows: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(1, 50, (rows, 10), generator=generator)
        for row in range(rows):
            self.tokens[row, 3 + row % 8 :] = 0

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        ids = self.tokens[row]
        return {
            "input_ids": ids,
            "attention_mask": (ids != 0).long(),
            "labels": (ids[0] > 25).long(),
        }


trainer = quorate.Trainer(
    Classifier,
    lambda model, batch: model(**batch),
    optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
    batch_size=16,
    shards=4,
)
trainer.fit(Texts(90), epochs=2)
