"""Tables with gradients by rows, of all kinds, under an MLP; killed and stopped as asked.

    quorate run --devices cpu --workers 2 --run-dir RUN tests/scripts/sparse_tables.py STEPS \
        [OPTIMIZER] [FOLDER]

Arguments: updates; sgd, adagrad or sparse_adam (of tables alone); a folder: whoever computes row 13
first kills itself, and leaves a file there.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import quorate
from quorate.transports.processes.worker import here

ROWS, BATCH, SHARDS, WORDS = 90, 16, 4, 400

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.5),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "sparse_adam": lambda params: torch.optim.SparseAdam(params, lr=0.01),
}


class Tables(nn.Module):
    """A padded table that is used twice, a bag, one that few rows read, and a frozen one."""

    def __init__(self, *, is_deep: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8, padding_idx=0, sparse=True)
        self.tied = nn.Embedding(WORDS, 8, padding_idx=0, sparse=True)
        self.tied.weight = self.words.weight
        self.bag = nn.EmbeddingBag(WORDS, 8, mode="sum", sparse=True)
        self.rare = nn.Embedding(5, 8, sparse=True)
        self.frozen = nn.Embedding(WORDS, 8, sparse=True).requires_grad_(False)
        self.norm = nn.BatchNorm1d(8) if is_deep else nn.Identity()
        self.head = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        if not is_deep:
            self.head.requires_grad_(False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        found = self.words(words).mean(1) + self.tied(words.flip(1)[:, :2]).sum(1)
        found = found + self.bag(words) + self.frozen(words).mean(1)
        if (few := words[:, 0] % 50 < 5).any():  # in most shards no row does
            found = found + few[:, None] * self.rare(words[:, 0] % 5)
        return self.head(F.dropout(self.norm(found), 0.2, self.training))


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    # Half of all words are of twenty: most shards read a row several times, and share some.
    words = torch.randint(WORDS, (ROWS, 6), generator=generator)
    often = torch.randint(20, (ROWS, 6), generator=generator)
    words = torch.where(torch.rand(ROWS, 6, generator=generator) < 0.5, often, words)
    return TensorDataset(words, torch.randint(4, (ROWS,), generator=generator), torch.arange(ROWS))


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    words, labels, numbers = batch
    if FOLDER is not None and here() is not None and bool((numbers == 13).any()):
        try:
            (FOLDER / "killed").touch(exist_ok=False)
        except FileExistsError:
            pass
        else:
            os.kill(os.getpid(), signal.SIGKILL)
    return F.cross_entropy(model(words), labels)


FOLDER = Path(sys.argv[3]) if len(sys.argv) > 3 else None

if __name__ == "__main__":
    name = sys.argv[2] if len(sys.argv) > 2 else "sgd"
    trainer = quorate.Trainer(
        lambda: Tables(is_deep=name != "sparse_adam"),
        loss,
        optimizer=quorate.Optimize(OPTIMIZERS[name], clip_norm=1.0, ema_decay=0.9),
        batch_size=BATCH,
        shards=SHARDS,
        seed=0,
    )
    trainer.fit(data(), steps=int(sys.argv[1]))
