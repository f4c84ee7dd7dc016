"""The feed: rows loaded by a waiting thread, and page-locked memory, which takes a GPU."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
import torch
from support.runs import soon
from torch.utils.data import Dataset

from quorate.coordination.plan import Plan
from quorate.data.dataloader import SamplerOrder
from quorate.data.feed import Feed
from quorate.data.source import Source

TICKETS = [(step, shard) for step in range(5) for shard in range(4)]


class Counted(Dataset[int]):
    """Rows without a cost."""

    def __init__(self) -> None:
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return 40

    def __getitem__(self, row: int) -> int:
        self.loaded.append(row)
        return row


def cheap(dataset: Counted) -> Source:
    """Return a source known to be cheap."""
    rows = Source(dataset, Plan(rows=40, batch_size=8, shards=4, seed=0))
    for _ in range(3):
        rows.load((0, 0))
        assert 0.0 < rows.load_s <= rows.last_s
    dataset.loaded.clear()
    return rows


def test_who_waits_loads_what_follows_and_no_more() -> None:
    dataset = Counted()
    rows = cheap(dataset)
    home = [ticket for ticket in TICKETS if ticket[1] == 1]
    told: list[object] = []
    with closing(Feed(rows, home, ahead=8, told=told.append)) as feed:
        taken = []
        for ticket in home:
            feed.load_following()
            before = len(dataset.loaded)
            taken += feed.take(ticket).data.tolist()
            assert len(dataset.loaded) == before
        assert taken == dataset.loaded == [row for t in home for row in rows.plan.shard(*t)]
        assert told == [said for ticket in home for said in (ticket, None)]


class Slow(Counted):
    """Rows for a loading thread."""

    def __getitem__(self, row: int) -> int:
        time.sleep(0.002)
        return super().__getitem__(row)


def test_who_takes_a_shard_beyond_those_ahead_wakes_the_loading_thread() -> None:
    rows = Source(Slow(), Plan(rows=40, batch_size=8, shards=4, seed=0))
    far = TICKETS[9]
    with ThreadPoolExecutor(1) as taker, closing(Feed(rows, TICKETS, ahead=2)) as feed:
        soon(lambda: feed.following(TICKETS[0]) is not None)
        time.sleep(0.05)  # the thread waits, with shards that nobody takes
        taken = taker.submit(feed.take, far).result(timeout=30)
    assert taken.rows.tolist() == rows.plan.shard(*far).tolist()


def test_memory_that_cannot_be_page_locked_ends_no_prefetching(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried: list[Any] = []

    def pinned(batch: Any, _device: torch.device) -> Any:
        tried.append(batch)
        if len(tried) % 2:
            raise RuntimeError("no page-locked memory is left")
        return batch

    monkeypatch.setattr("quorate.data.feed.pinned", pinned)
    rows = cheap(Counted())
    with closing(Feed(rows, TICKETS, ahead=2, moves_to=torch.device("cuda"))) as feed:
        assert [feed.take(t).rows.tolist() for t in TICKETS] == [
            rows.plan.shard(*t).tolist() for t in TICKETS
        ]
    assert len(tried) == len(TICKETS)
    assert caplog.text.count("without page-locked memory, so copies are slower (RuntimeError") == 1


class Halves:
    """A sampler of the even rows of even epochs, and of the odd rows of odd epochs."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        time.sleep(0.01)  # for a second thread to come

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.epoch % 2, 40, 2))


def test_a_sampler_is_asked_by_one_thread_at_a_time() -> None:
    order = SamplerOrder(Halves(), 40, "dataset")
    with ThreadPoolExecutor(2) as pool:
        found = [*pool.map(lambda epoch: order.drawn(0, epoch).tolist(), range(2))]
    assert found == [[*range(0, 40, 2)], [*range(1, 40, 2)]]
