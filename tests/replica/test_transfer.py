"""Transfers of batches: nothing changes on a CPU; on a GPU, the next batch is on its way."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch.utils.data import TensorDataset

from quorate.coordination.plan import Plan
from quorate.data.feed import Feed
from quorate.data.source import Source
from quorate.replica.nested import leaves, mapped, tensors
from quorate.replica.transfer import Transfers, pinned

CPU = torch.device("cpu")


class Pair(NamedTuple):
    image: torch.Tensor
    rest: dict[str, object]


BATCH = [Pair(torch.ones(2), {"a": torch.zeros(1), "b": "text"}), (torch.ones(1), 3)]


def test_the_structure_of_a_batch_is_kept() -> None:
    made = mapped(BATCH, lambda tensor: tensor + 1)
    assert type(made[0]) is Pair
    assert made[0].rest["b"] == "text"
    assert made[1][1] == 3
    assert [tensor.tolist() for tensor in tensors(made)] == [[2, 2], [1], [2]]
    assert [leaf for leaf in leaves(made) if not isinstance(leaf, torch.Tensor)] == ["text", 3]
    assert BATCH[0].rest["a"] == 0


def test_on_a_cpu_a_batch_stays_where_it_is() -> None:
    assert pinned(BATCH, CPU) is BATCH
    transfers = Transfers(CPU)
    transfers.begin(BATCH)
    taken = transfers.take(BATCH)
    assert all(a is b for a, b in zip(tensors(taken), tensors(BATCH), strict=True))


def test_a_feed_shows_what_comes_next_and_keeps_it() -> None:
    plan = Plan(rows=12, batch_size=6, shards=3, seed=0, shuffle=False)
    source = Source(TensorDataset(torch.arange(12.0)), plan)
    tickets = [(0, 0), (0, 1), (0, 2)]
    feed = Feed(source, tickets, ahead=3)
    try:
        feed.take((0, 2))  # so the others are loaded
        following = feed.following((0, 0))
        assert following is not None
        assert following.rows.tolist() == [2, 3]
        assert feed.take((0, 1)) is following
        assert feed.following((0, 1)) is None
    finally:
        feed.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU is here")
def test_batches_reach_a_gpu_whole_whatever_was_begun() -> None:
    device = torch.device("cuda:0")
    transfers = Transfers(device)
    batches = [pinned([torch.full((1 << 22,), float(n)), {"label": n}], device) for n in range(6)]
    assert all(tensor.is_pinned() for batch in batches for tensor in tensors(batch))
    for number, batch in enumerate(batches):
        transfers.begin(batch)
        if number % 2 == 0 and number + 1 < len(batches):
            transfers.begin(batches[number + 1])
        busy = torch.randn(2048, 2048, device=device)
        for _ in range(10):
            busy = busy @ busy / 2048
        moved = transfers.take(batch)
        assert moved[1] == {"label": number}
        assert moved[0].device == device
        assert moved[0].min() == moved[0].max() == number
