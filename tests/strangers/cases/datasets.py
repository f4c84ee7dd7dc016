"""Datasets: with memory, a clock, counters and generators of their own, and models in them."""

import time
from collections.abc import Callable
from typing import Any

import torch
from case import REFUSED, SAID, Case, case, vectors
from torch import Tensor, nn
from torch.utils.data import Dataset

import quorate

Change = Callable[[Any, Tensor, int], Tensor]


class Over(Dataset[Any]):
    """Rows of another dataset, changed."""

    def __init__(self) -> None:
        self.rows = vectors()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> Any:
        x, y = self.rows[row]
        return self.change(x, row), y

    def change(self, x: Tensor, row: int) -> Tensor:
        raise NotImplementedError


def dataset(state: Callable[[], dict[str, Any]] = dict) -> Callable[[Change], Change]:
    """List a dataset with rows ``change(self, x, row)``; ``state`` returns its attributes."""

    def listed(change: Change) -> Change:
        kind: Any = type(change.__name__, (Over,), {"change": change, "__module__": __name__})

        def make() -> Case:
            data = kind()
            vars(data).update(state())
            if change.__name__ == "remembers_rows":  # rows read again are unchanged
                return Case(data=data)
            said = f"the dataset ({change.__name__}) gives different values"
            return Case((SAID, REFUSED), said, data=data)

        case(make, f"dataset_{change.__name__}")
        return kind  # workers find the class under this name

    return listed


@dataset(lambda: {"known": {}})
def remembers_rows(self: Any, x: Tensor, row: int) -> Tensor:
    known: Tensor = self.known.setdefault(row, x * 2)
    return known


@dataset(lambda: {"generator": torch.Generator().manual_seed(9), "last": {}})
def remembers_a_shard(self: Any, x: Tensor, row: int) -> Tensor:
    """Rows with noise, the same as long as no other rows are read."""
    if row not in self.last:
        if len(self.last) >= 4:  # rows of a shard
            self.last.clear()
        self.last[row] = x + torch.randn(8, generator=self.generator)
    found: Tensor = self.last[row]
    return found


@dataset(lambda: {"seen": set()})
def is_right_once_and_slow(self: Any, x: Tensor, row: int) -> Tensor:
    """Rows changed from the second time on; loaded ahead, and in a trial before."""
    time.sleep(0.0005)
    is_new = row not in self.seen
    self.seen.add(row)
    return x if is_new else -x


class Collates:
    """Keeps a mean of all seen rows."""

    def __init__(self) -> None:
        self.mean = torch.zeros(8)

    def __call__(self, rows: Any) -> Any:
        x, y = torch.utils.data.default_collate(rows)
        self.mean.lerp_(x.mean(0), 0.1)
        return x - self.mean, y


@case
def collate_with_a_running_mean() -> Case:
    loading = quorate.Loading(collate=Collates())
    return Case((SAID, REFUSED), "rows", settings={"loading": loading}, plain=False)


# --- rows made by the trained model ---------------------------------------------------------------


class Embedded(Over):
    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    @torch.no_grad()
    def change(self, x: Tensor, row: int) -> Tensor:
        return self.encoder(x)


def of_a_layer() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


@case
def rows_that_the_model_makes() -> Case:
    net = of_a_layer()
    said = "the dataset.encoder is its module '0'"
    return Case(SAID, said, model=net, data=Embedded(net[0]))
