"""The source: rows are those of the plan, however the dataset hands them over."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset, TensorDataset

from quorate.coordination.plan import Plan
from quorate.data.source import Source


def test_tensors_are_indexed_as_a_whole_and_equal_to_collated_rows() -> None:
    tensors = TensorDataset(torch.arange(40), torch.rand(40, 3))
    plan = Plan(rows=40, batch_size=8, shards=4, seed=0)
    fast = Source(tensors, plan).load((2, 1)).data
    slow = Source(list(tensors), plan).load((2, 1)).data
    assert type(fast) is type(slow) is list
    assert all(torch.equal(a, b) for a, b in zip(fast, slow, strict=True))


def test_rows_are_asked_for_together_where_that_is_offered() -> None:
    asked = []

    class Together(Dataset[int]):
        def __len__(self) -> int:
            return 40

        def __getitems__(self, rows: list[int]) -> list[int]:
            asked.append(len(rows))
            return rows

    source = Source(Together(), Plan(rows=40, batch_size=8, shards=4, seed=0))
    for _ in range(2):
        batch = source.load((0, 0))
        assert batch.data.tolist() == batch.rows.tolist()
    assert asked == [2, 2]
