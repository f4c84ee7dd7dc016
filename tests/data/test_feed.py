"""The feed: in order, ahead, and gone when it is closed."""

from __future__ import annotations

import threading
import time
from contextlib import closing
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from quorate.coordination.plan import Plan
from quorate.data.feed import Feed
from quorate.data.source import Source

TICKETS = [(step, shard) for step in range(5) for shard in range(4)]


class Slow(Dataset[int]):
    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return 40

    def __getitem__(self, row: int) -> int:
        time.sleep(self.seconds)
        self.loaded.append(row)
        return row


def source(dataset: Any) -> Source:
    plan = Plan(rows=len(dataset), batch_size=8, shards=4, seed=0)
    return Source(dataset, plan)


@pytest.mark.parametrize("loader_workers", [0, 2])
def test_every_ticket_gets_its_rows_in_any_order_of_asking(loader_workers: int) -> None:
    rows = source(Slow())
    with closing(Feed(rows, TICKETS, ahead=8, loader_workers=loader_workers)) as feed:
        for step in range(5):
            for shard in (2, 0, 3, 1):
                batch = feed.take((step, shard))
                assert batch.data.tolist() == batch.rows.tolist()
                assert batch.rows.tolist() == rows.plan.shard(step, shard).tolist()
        again = feed.take((1, 1))  # of a step that is over, by a worker that is late
        assert again.data.tolist() == rows.plan.shard(1, 1).tolist()


def test_it_loads_ahead_and_not_too_far() -> None:
    dataset = Slow()
    with closing(Feed(source(dataset), TICKETS, ahead=8)) as feed:
        deadline = time.monotonic() + 60
        while len(dataset.loaded) < 18 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        assert len(dataset.loaded) == 2 * (8 + 1)  # 8 held, one in hand
        feed.take((0, 0))


def test_what_is_cheap_is_loaded_when_it_is_taken_and_ahead_once_it_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("quorate.data.feed.SLOW_LOADS", 4)
    dataset = Slow()
    rows = source(dataset)
    for _ in range(50):  # one of them is as fast as it can be
        rows.load((0, 0))
    with closing(Feed(rows, TICKETS, ahead=8)) as feed:
        before = len(dataset.loaded)
        feed.take((0, 0))
        assert len(dataset.loaded) == before + 2
        dataset.seconds = 0.001
        for step, shard in TICKETS[1:5]:
            assert feed.take((step, shard)).rows.tolist() == rows.plan.shard(step, shard).tolist()
        deadline = time.monotonic() + 60
        while len(dataset.loaded) < before + 2 * 9 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(dataset.loaded) >= before + 2 * 9  # more than were taken
        for ticket in TICKETS[5:]:
            assert feed.take(ticket).rows.tolist() == rows.plan.shard(*ticket).tolist()


def test_closing_wakes_a_worker_that_waits() -> None:
    feed = Feed(source(Slow(0.05)), TICKETS, ahead=8)
    taken: list[object] = []
    waiting = threading.Thread(target=lambda: taken.append(feed.take((1, 3))))
    waiting.start()
    time.sleep(0.02)
    feed.close()
    waiting.join(timeout=60)
    assert len(taken) == 1  # loaded by the worker itself


@pytest.mark.parametrize("loader_workers", [0, 1])
def test_what_a_dataset_raises_reaches_who_asked_with_the_row(loader_workers: int) -> None:
    class UnpicklableError(KeyError):
        def __init__(self, text: str) -> None:
            super().__init__(text)
            self.lock = threading.Lock()

    class Broken(Slow):
        def __getitem__(self, row: int) -> int:
            if row == 17:
                raise UnpicklableError("no such image")
            return row

    rows = source(Broken())
    bad = next(t for t in TICKETS if 17 in rows.plan.shard(*t))
    with closing(Feed(rows, TICKETS, ahead=8, loader_workers=loader_workers)) as feed:
        for ticket in TICKETS:
            if ticket == bad:
                with pytest.raises(KeyError, match="no such image") as caught:
                    feed.take(ticket)
                assert "while loading row 17" in caught.value.__notes__[0]
            else:
                assert feed.take(ticket).data.tolist() == rows.plan.shard(*ticket).tolist()


class Counted(Dataset[int]):
    """Rows that cost nothing, but for one that cannot be had."""

    def __init__(self) -> None:
        self.broken = -1
        self.error: BaseException | None = None
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return 40

    def __getitem__(self, row: int) -> int:
        self.loaded.append(row)
        if row == self.broken:
            assert self.error is not None
            raise self.error
        return row


def cheap(dataset: Counted) -> Source:
    """Return a source that is known to be cheap."""
    rows = source(dataset)
    for _ in range(3):
        rows.load((0, 0))
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
            for _ in range(2):
                feed.load_following()
        assert taken == dataset.loaded == [row for t in home for row in rows.plan.shard(*t)]
        assert told == [said for ticket in home for said in (ticket, None)]


def test_what_follows_is_kept_while_others_are_taken_and_dropped_when_it_is_late() -> None:
    dataset = Counted()
    rows = cheap(dataset)
    home = [ticket for ticket in TICKETS if ticket[1] == 1]
    with closing(Feed(rows, home, ahead=8)) as feed:
        feed.take((0, 1))
        feed.load_following()  # (1, 1)
        feed.take((0, 3))  # of a worker that is slow
        feed.load_following()
        before = len(dataset.loaded)
        assert feed.take((1, 1)).data.tolist() == rows.plan.shard(1, 1).tolist()
        assert len(dataset.loaded) == before
        feed.load_following()  # (2, 1), which another computes
        feed.take((3, 0))
        feed.load_following()
        before = len(dataset.loaded)
        assert feed.take((3, 1)).data.tolist() == rows.plan.shard(3, 1).tolist()
        assert len(dataset.loaded) == before
        assert feed.take((2, 1)).data.tolist() == rows.plan.shard(2, 1).tolist()


@pytest.mark.parametrize("error", [ValueError("a row"), SystemExit("a row")])
def test_what_cannot_be_loaded_raises_when_it_is_taken(error: BaseException) -> None:
    dataset = Counted()
    rows = cheap(dataset)
    dataset.broken, dataset.error = int(rows.plan.shard(0, 1)[0]), error
    with closing(Feed(rows, TICKETS, ahead=8)) as feed:
        feed.take((0, 0))
        feed.load_following()
        with pytest.raises(type(error), match="a row"):
            feed.take((0, 1))
        feed.load_following()
        assert feed.take((0, 2)).data.tolist() == rows.plan.shard(0, 2).tolist()


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
    rows = source(Slow())
    with closing(Feed(rows, TICKETS, ahead=2, moves_to=torch.device("cuda"))) as feed:
        assert [feed.take(t).rows.tolist() for t in TICKETS] == [
            rows.plan.shard(*t).tolist() for t in TICKETS
        ]
    assert len(tried) == len(TICKETS)
    assert caplog.text.count("without page-locked memory, so copies are slower (RuntimeError") == 1
