"""Data of the configurations: inputs of each kind, and ways to make a dataset of the inputs.

All values follow from a fixed seed. Legend: R rows, ``BATCH`` of them in a batch. Token 0 is
padding.
"""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from support.trainings.models import CLASSES, WORDS
from torch.utils.data import Dataset, TensorDataset

import quorate

BATCH = 24
# Five updates in an epoch. A short last update has 14 rows: six shards of two, as for BatchNorm.
ROWS, SHORT_ROWS = 120, 110


INPUTS: dict[str, Callable[[int, torch.Generator], torch.Tensor]] = {
    "vectors": lambda rows, of: torch.randn(rows, 8, generator=of),  # (R, 8) float32
    "images": lambda rows, of: torch.randn(rows, 3, 8, 8, generator=of),  # (R, 3, 8, 8) float32
    "tokens": lambda rows, of: torch.randint(
        WORDS, (rows, 7), generator=of
    ),  # (R, 7); 0 is padding
}


class Data(NamedTuple):
    """The data of a run."""

    dataset: Any
    loading: Mapping[str, Any] = MappingProxyType({})  # keywords of ``quorate.Loading``
    validation: Any = None  # None: a plain dataset of other rows


def _tensors(inputs: str, rows: int, seed: int = 0) -> list[torch.Tensor]:
    """Return inputs and classes. A class follows from its row: there is something to learn."""
    generator = torch.Generator().manual_seed(seed)
    x = INPUTS[inputs](rows, generator)
    y = (x.flatten(1)[:, :3] * torch.tensor([1, 2, 3])).sum(1).round().long() % CLASSES
    return [x, y]


def _rows(inputs: str, rows: int) -> TensorDataset:
    return TensorDataset(*_tensors(inputs, rows))


def weighted(inputs: str, folder: Path) -> Data:
    """Every row has a weight, 1 to 9: the means are over weights and not over rows."""
    weights = [1.0 + torch.arange(rows) * 5 % 9 for rows in (SHORT_ROWS, 31)]
    train, validation = (
        TensorDataset(*_tensors(inputs, len(each), seed), each) for seed, each in enumerate(weights)
    )
    return Data(train, validation=validation)


def stream(inputs: str, folder: Path) -> Data:
    """Lines of JSON in three files, read in windows."""
    from quorate.data.streams import LinesDataset, windows

    files = [folder / f"{number}.jsonl" for number in range(3)]
    if not files[-1].exists():  # workers run the script after the main process has written them
        x, y = _tensors(inputs, SHORT_ROWS)
        for number, file in enumerate(files):
            written = file.with_suffix(f".{os.getpid()}")
            rows = range(number, SHORT_ROWS, 3)
            written.write_text(
                "".join(json.dumps([x[row].tolist(), y[row].item()]) + "\n" for row in rows)
            )
            written.rename(file)
    dataset = LinesDataset(files, _parsed)
    return Data(dataset, {"order": windows(dataset, rows=8, files=2)})


def _parsed(line: bytes) -> tuple[torch.Tensor, int]:
    x, y = json.loads(line)
    return torch.tensor(x), y


class Noisy(Dataset[Any]):
    """Rows distorted when loaded: each draws different numbers."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.x[row]
        if x.is_floating_point():
            return x + 0.1 * torch.randn(x.shape), self.y[row]
        return torch.where(torch.rand(x.shape) < 0.1, 1, x), self.y[row]


def _distort(batch: list[torch.Tensor], draws: quorate.Draws) -> list[torch.Tensor]:
    x, y = batch
    shape = (-1, *[1] * (x.ndim - 1))
    if x.is_floating_point():
        return [x * draws.uniform(1, 0.5, 1.5).view(shape) + draws.uniform(1).view(shape), y]
    return [torch.where(draws.coins(0.3).view(shape), x.flip(1), x), y]


DATASETS: dict[str, Callable[[str, Path], Data]] = {
    "plain": lambda inputs, _: Data(_rows(inputs, ROWS)),  # every batch is full
    "short": lambda inputs, _: Data(_rows(inputs, SHORT_ROWS)),  # no number of shards divides 14
    "joined": lambda inputs, _: Data(_rows(inputs, SHORT_ROWS), {"last": "join"}),
    "weighted": weighted,
    "stream": stream,
    # Rows are distorted separately, with numbers from torch's generator; by a loader process too.
    "augmented": lambda inputs, _: Data(Noisy(*_tensors(inputs, SHORT_ROWS))),
    "loaded": lambda inputs, _: Data(Noisy(*_tensors(inputs, SHORT_ROWS)), {"processes": 1}),
    # Batches are distorted, with numbers from ``quorate.Draws``.
    "distorted": lambda inputs, _: Data(_rows(inputs, ROWS), {"augment": _distort}),
    # Rows of an epoch are drawn by weights.
    "sampled": lambda inputs, _: Data(
        _rows(inputs, SHORT_ROWS), {"sampling": 1.0 + torch.arange(SHORT_ROWS) % 4}
    ),
}


def make_data(name: str, inputs: str, folder: Path) -> Data:
    """Return a dataset of the table, with validation rows.

    Args:
        inputs: a name in ``INPUTS``.
        folder: where files of the dataset are, or are written to.
    """
    data = DATASETS[name](inputs, folder)
    if data.validation is None:
        data = data._replace(validation=TensorDataset(*_tensors(inputs, 31, seed=1)))
    return data
