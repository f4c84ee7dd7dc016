"""A training on rows that come in one of several ways; it counts how often each was in an update.

    quorate run --devices cpu --workers 2 --run-dir RUN tests/scripts/fed.py KIND FOLDER STEPS PACE

KIND: sampled (rows drawn by their classes), loader (a DataLoader with a weighted sampler), tar,
lines or stream (of files in FOLDER, whose row r holds r), hf-json, hf-csv or hf-parquet (streamed
by Hugging Face's datasets from the files part-* in FOLDER). STEPS: updates in all. PACE: seconds
that each takes at least; may be left out. FOLDER/seen-EPOCH.npy gets how often each row was, over
all runs that end by themselves. The last line is JSON: the digest, what was validated, and updates
per epoch.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler, default_collate

import quorate
from quorate.data.streams import LinesDataset, Stream, TarDataset, windows
from quorate.replica.digest import digest

kind, folder, steps = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
pace_s = float(sys.argv[4]) if len(sys.argv) > 4 else 0.0


def sample(row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Features of a row with noise that belongs to row and epoch, and its number."""
    x = torch.tensor([row % 7, row % 11, row % 13, 1.0]) / 10
    return x + 0.01 * torch.randn(4), torch.tensor(row)


class Rows:
    """Rows in memory."""

    def __len__(self) -> int:
        return 300

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        return sample(row)


def halved(samples: list[Any]) -> Any:
    x, row = default_collate(samples)
    return x / 2, row


def together(rows: list[int]) -> Any:
    """Features of many rows at once, and their numbers."""
    row = torch.tensor(rows)
    return torch.stack([row % 7, row % 11, row % 13, row % 2], dim=1) / 10, row


def lines_of(path: Path) -> Iterator[int]:
    with path.open() as file:
        yield from map(json.loads, file)


loading = quorate.Loading()
validation: Any = TensorDataset(torch.ones(8, 4), torch.zeros(8, dtype=torch.int64))
data: Any = Rows()
if kind == "sampled":
    labels = [row // 280 for row in range(300)]
    loading = quorate.Loading(sampling=quorate.Sampling.balanced(labels), last="join")
elif kind == "loader":
    weights = torch.arange(300) % 5
    sampler = WeightedRandomSampler(weights.tolist(), 250)
    validation = DataLoader(Rows(), 7)
    data = DataLoader(data, 64, sampler=sampler, collate_fn=halved, drop_last=True)
elif kind == "tar":
    data = TarDataset(sorted(folder.glob("*.tar")), decode=lambda found: int(found["row"]))
    order = windows(data, rows=1000, files=2)
    loading, validation = quorate.Loading(order=order, collate=together), range(8)
elif kind == "lines":
    data = LinesDataset(sorted(folder.glob("*.jsonl")), lambda line: sample(json.loads(line)))
elif kind == "stream":
    files = sorted(folder.glob("*.jsonl"))
    data = Stream(files, lines_of, decode=sample, window=40, files_at_once=2)
elif kind.startswith("hf-"):
    from datasets import load_dataset

    files = [str(path) for path in sorted(folder.glob("part-*"))]
    ds = load_dataset(kind.removeprefix("hf-"), data_files=files, split="train", streaming=True)
    data = Stream(
        range(ds.num_shards),
        lambda i, start: ds.shard(ds.num_shards, i).skip(start),
        decode=lambda found: sample(found["row"]),
        window=40,
        files_at_once=2,
        skips=True,
    )
number = len(data.dataset if kind == "loader" else data)


def loss(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    x, row = batch
    found = {"loss": (model(x)[:, 0] - torch.sin(row / 50)).square().mean()}
    return found | {"seen": torch.bincount(row, minlength=number)} if model.training else found


class Seen(quorate.Callback):
    """Adds up what was seen, by epoch."""

    def __init__(self) -> None:
        self.epochs: dict[int, Any] = {}

    def updated(self, report: quorate.Report) -> None:
        time.sleep(pace_s)
        seen = report.totals["seen"].numpy()
        self.epochs[report.epoch] = self.epochs.get(report.epoch, 0) + seen

    def evaluated(self, _step: int, metrics: dict[str, float]) -> None:
        self.validated = metrics["loss"]


torch.manual_seed(0)
seen = Seen()
trainer = quorate.Trainer(
    nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1)),
    loss,
    totals={"seen": lambda total: float(total.sum())},
    optimizer=lambda params: torch.optim.Adam(params, lr=1e-2),
    batch_size=2000 if kind == "tar" else 64,
    shards=4,
    loading=loading,
)
per_epoch = trainer.updates_per_epoch(data)
trainer.fit(data, steps=steps, validation=validation, callbacks=[seen])
for epoch, counts in seen.epochs.items():
    path = folder / f"seen-{epoch}.npy"
    np.save(path, counts + (np.load(path) if path.exists() else 0))
found = {"digest": digest(trainer.model.state_dict().items()), "per_epoch": per_epoch}
print(json.dumps(found | {"validated": getattr(seen, "validated", None)}))
