"""The source: rows are those of the plan, however the dataset hands them over."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from quorate.coordination.plan import Plan
from quorate.data.columns import Column
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


def test_a_run_of_shards_is_what_each_of_them_is_and_lies_as_it_would() -> None:
    # Of 16 rows a shard of 8 begins at a multiple of 64 bytes, one of 3 or 4 does not.
    for batch_size, shards in ((16, 2), (16, 4), (13, 4)):
        plan = Plan(rows=50, batch_size=batch_size, shards=shards)
        columns = torch.randn(50, 32), torch.arange(50), torch.randn(50, 3, 2, 2)
        channels_last = columns[2].contiguous(memory_format=torch.channels_last)
        source = Source(TensorDataset(*columns, channels_last), plan)
        for step in range(plan.steps_per_epoch):
            tickets = [(step, shard) for shard in range(plan.shards_of(step))]
            for ticket, batch in zip(tickets, source.load_run(tickets), strict=True):
                alone = source.load(ticket)
                assert batch.rows.tolist() == alone.rows.tolist()
                for one, other in zip(batch.data, alone.data, strict=True):
                    assert torch.equal(one, other)
                    assert one.stride() == other.stride()
                    assert one.data_ptr() % 64 == other.data_ptr() % 64 == 0


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(50, 3, 8, 8),
        torch.randn(50, 3, 8, 8).contiguous(memory_format=torch.channels_last),
        torch.randn(8, 50).t(),
        torch.randn(50, 8, requires_grad=True),
        torch.randn(50, 8, dtype=torch.complex64),
        torch.arange(50),
        torch.rand(50) < 0.5,
        torch.randn(50, 4).bfloat16(),
        torch.randn(50, 0),
    ],
    ids=lambda tensor: f"{tensor.dtype}{[*tensor.shape]}".removeprefix("torch."),
)
def test_rows_are_taken_as_by_indexing(tensor: torch.Tensor) -> None:
    for index in (torch.tensor([3, 3, 49, 0]), torch.empty(0, dtype=torch.int64)):
        rows, expected = Column(tensor).rows(index), tensor[index]
        assert rows.equal(expected)
        assert (rows.dtype, rows.stride()) == (expected.dtype, expected.stride())
        assert rows.requires_grad is expected.requires_grad
        assert not rows.numel() or rows.data_ptr() != tensor.data_ptr()
