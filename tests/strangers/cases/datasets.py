"""Datasets: with memory, a clock, counters and generators of their own."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from case import REFUSED, SAID, SAME, Case, case, cross_entropy, mlp, vectors
from torch.utils.data import Dataset


class Over(Dataset[Any]):
    """Rows of another one, changed."""

    def __init__(self) -> None:
        self.rows = vectors()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> Any:
        x, y = self.rows[row]
        return self.change(x, row), y

    def change(self, x: torch.Tensor, row: int) -> torch.Tensor:
        raise NotImplementedError


def over(data: Over, *names: str) -> Case:
    outcomes = (SAID, REFUSED) if names else (SAME,)
    return Case(
        mlp(), cross_entropy, data, plain=not names, outcomes=outcomes, names="".join(names)
    )


@case
def dataset_that_counts_its_reads() -> Case:
    class Counts(Over):
        reads = 0

        def change(self, x: torch.Tensor, row: int) -> torch.Tensor:
            self.reads += 1
            return x * (1 + 0.01 * self.reads)

    return over(Counts(), "rows")


@case
def dataset_with_a_clock() -> Case:
    class Clock(Over):
        def change(self, x: torch.Tensor, row: int) -> torch.Tensor:
            return x + 0.01 * (time.perf_counter() % 1)

    return over(Clock(), "rows")


@case
def dataset_with_a_generator_of_its_own() -> Case:
    class Draws(Over):
        def __init__(self) -> None:
            super().__init__()
            self.numbers = np.random.default_rng(0)

        def change(self, x: torch.Tensor, row: int) -> torch.Tensor:
            return x + 0.1 * float(self.numbers.standard_normal())

    return over(Draws(), "rows")


@case
def dataset_that_remembers_rows() -> Case:
    """A cache: what is read again is what was read."""

    class Remembers(Over):
        def __init__(self) -> None:
            super().__init__()
            self.known: dict[int, torch.Tensor] = {}

        def change(self, x: torch.Tensor, row: int) -> torch.Tensor:
            if row not in self.known:
                self.known[row] = x * 2
            return self.known[row]

    return over(Remembers())


@case
def dataset_that_mixes_with_the_last_row() -> Case:
    class Mixes(Over):
        last: torch.Tensor | None = None

        def change(self, x: torch.Tensor, row: int) -> torch.Tensor:
            before, self.last = self.last, x
            return x if before is None else 0.9 * x + 0.1 * before

    return over(Mixes(), "rows")


@case
def dataset_that_writes_its_rows() -> Case:
    """Normalises a row in its place, each time that it is read."""

    class Writes(Over):
        def change(self, x: torch.Tensor, row: int) -> torch.Tensor:
            return x.mul_(0.9)

    return over(Writes(), "rows")


class Collates:
    """Keeps a mean of what it has seen."""

    def __init__(self) -> None:
        self.mean = torch.zeros(8)

    def __call__(self, rows: Any) -> Any:
        x, y = torch.utils.data.default_collate(rows)
        self.mean.lerp_(x.mean(0), 0.1)
        return x - self.mean, y


@case
def collate_with_a_running_mean() -> Case:
    import quorate

    return Case(
        mlp(), cross_entropy, vectors(), plain=False, outcomes=(SAID, REFUSED), names="rows",
        settings={"loading": quorate.Loading(collate=Collates())},
    )  # fmt: skip
