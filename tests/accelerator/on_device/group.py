"""The double of a process group: all ranks hear of calls that do not fit together."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.accelerator.group import Communicator, Work

SIZE = 4096
Call = Callable[[Any, list[torch.Tensor]], Work]  # on two vectors


def add(group: Any, vectors: list[torch.Tensor]) -> Work:
    return group.reduce_scatter([vectors[0]], [vectors])


def swap(group: Any, vectors: list[torch.Tensor]) -> Work:
    group._start_coalescing()
    group.send(vectors[:1], int(vectors[0].device.index == 0), 0)
    group.recv(vectors[1:], int(vectors[0].device.index == 0), 0)
    return group._end_coalescing()


@pytest.mark.parametrize(
    ("calls", "sizes", "fits"),
    [
        ([[swap, add], [swap, add]], [SIZE, SIZE], True),
        ([[swap, add], [add, swap]], [SIZE, SIZE], False),
        ([[add], [add]], [SIZE, SIZE // 2], False),
        ([[swap], [swap]], [SIZE, SIZE // 2], False),
    ],
)
def test_calls_fit_or_raise(
    calls: Sequence[Sequence[Call]], sizes: Sequence[int], fits: bool
) -> None:
    store, raised, kept = dist.HashStore(), list[str](), list[Any]()

    def rank(number: int) -> None:
        options = {"group_rank": number, "group_size": 2, "timeout": timedelta(seconds=60)}
        group: Any = Communicator(SimpleNamespace(store=store, **options), None)
        vectors = [torch.ones(sizes[number], device=f"sim:{number}") for _ in range(2)]
        kept.append(vectors)  # memory may not be given back before a stream is done
        steps = [lambda call=call: call(group, vectors).wait() for call in calls[number]]
        while steps or not group._stream.query():
            try:
                steps.pop(0)() if steps else torch.zeros(1, device=f"sim:{number}")
            except RuntimeError as error:
                raised.append(str(error))
            time.sleep(0.01)

    with ThreadPoolExecutor(2) as pool:
        [*pool.map(rank, range(2))]
    assert bool(raised) != fits
    assert [text for text in raised if "ranks call what does not fit: rank " not in text] == []
