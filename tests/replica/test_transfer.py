"""Transfers of batches: nothing changes on a CPU; on a GPU, the next batch is on its way."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from quorate.replica.nested import tensors
from quorate.replica.transfer import Transfers, pinned

CPU = torch.device("cpu")


class Pair(NamedTuple):
    image: torch.Tensor
    rest: dict[str, object]


BATCH = [Pair(torch.ones(2), {"a": torch.zeros(1), "b": "text"}), (torch.ones(1), 3)]


def test_on_a_cpu_a_batch_stays_where_it_is() -> None:
    assert pinned(BATCH, CPU) is BATCH
    transfers = Transfers(CPU)
    transfers.begin(BATCH)
    taken = transfers.take(BATCH)
    assert all(a is b for a, b in zip(tensors(taken), tensors(BATCH), strict=True))


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
