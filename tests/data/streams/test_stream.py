"""Streams: rows of files that can only be read from their beginnings, each by its number."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support.messages import expect_error
from torch.utils.data import DataLoader

import quorate
from quorate.coordination.plan import Plan
from quorate.data.dataloader import taken
from quorate.data.loading import Loading
from quorate.data.source import Source
from quorate.data.streams import Stream, Windows, stream
from quorate.errors import CheckpointError, DataError, SettingError

COUNTS = [50, 0, 7, 33]


class Files:
    """Files of numbers; it notes how they are read."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.read = 0

    def rows(self, file: int, start: int = 0) -> Iterator[int]:
        self.begun.append(file)
        for place in range(start, COUNTS[file]):
            self.read += 1
            yield 100 * file + place


EXPECTED = [100 * file + place for file in range(4) for place in range(COUNTS[file])]


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("counts", [None, COUNTS])
def test_any_row_by_its_number(skips: bool, counts: Any) -> None:
    files = Files()
    begin = files.rows if skips else lambda file: files.rows(file)
    rows = Stream(range(4), begin, counts=counts, window=8, skips=skips)
    assert rows.counts == COUNTS
    assert len(rows) == 90
    asked = list(range(90))
    random.Random(0).shuffle(asked)
    assert [rows[n] for n in asked] == [EXPECTED[n] for n in asked]
    assert rows[-1] == EXPECTED[-1]
    with pytest.raises(IndexError):
        rows[90]


def test_an_epoch_in_its_order_reads_each_file_once() -> None:
    files = Files()
    rows = Stream(range(4), lambda f: files.rows(f), counts=COUNTS, window=8, files_at_once=2)
    plan = Plan(rows=90, batch_size=10, shards=2, order=rows.order)
    for epoch in range(2):
        files.begun, files.read = [], 0
        found = []
        for step in range(9 * epoch, 9 * epoch + 9):
            found += [rows[int(n)] for n in plan.batch(step)]
        assert sorted(found) == EXPECTED
        assert sorted(files.begun) == [0, 2, 3]
        assert files.read == 90
    # From the middle of an epoch what comes before is passed over, or need not be.
    for skips, most in ((False, 90), (True, 90 - 60 + 3 * 8)):
        files = Files()
        begin = files.rows if skips else partial(files.rows, start=0)
        rows = Stream(range(4), begin, counts=COUNTS, window=8, files_at_once=2, skips=skips)
        again = [rows[int(n)] for step in range(6, 9) for n in plan.batch(step)]
        assert again == [EXPECTED[int(n)] for step in range(6, 9) for n in plan.batch(step)]
        assert files.read <= most


def test_what_is_drawn_while_rows_are_read_follows_from_their_window() -> None:
    """However the window is come to: in order, by passing over, or again."""

    def drawing(file: int) -> Iterator[float]:
        for _ in range(COUNTS[file]):
            yield random.random() + float(np.random.rand()) + torch.rand(()).item()

    def all_of(asked: list[int]) -> dict[int, float]:
        rows = Stream(range(4), drawing, counts=COUNTS, window=8)
        random.random()
        return {n: rows[n] for n in asked}

    state = random.getstate()
    in_order = all_of(list(range(90)))
    assert len(set(in_order.values())) == 90
    backwards = all_of(list(range(89, -1, -1)))
    assert in_order == backwards
    random.setstate(state)


def test_what_decode_draws_belongs_to_row_and_epoch() -> None:
    def loaded(step: int, asked_before: int) -> Any:
        rows = Stream(
            range(4),
            lambda f: Files().rows(f),
            counts=COUNTS,
            window=8,
            decode=lambda n: (n, torch.rand(()).item()),
        )
        source = Source(rows, Plan(rows=90, batch_size=30, shards=3, order=rows.order))
        for before in range(asked_before):
            source.load((before, 0))
        return source.load((step, 2)).data[1].tolist()

    assert loaded(1, 0) == loaded(1, 2)
    assert loaded(1, 0) != loaded(4, 0)


def test_files_of_other_rows_than_were_counted_are_refused() -> None:
    for counts in ([50, 0, 9, 33], [50, 0, 5, 33]):
        rows = Stream("abcd", lambda f: Files().rows("abcd".index(f)), counts=counts, window=8)
        with expect_error(DataError, name="Stream, file 2 (c)"):
            [rows[n] for n in range(len(rows))]
    with expect_error(SettingError, name="Stream.counts", got="3 counts"):
        Stream(range(4), Files().rows, counts=[1, 2, 3])
    with expect_error(DataError, name="Stream", got="no row in any file"):
        Stream(range(2), lambda _: iter([]))
    with expect_error(SettingError, name="Stream.rows", got="list"):
        Stream(range(2), [1, 2])  # type: ignore[arg-type]


def test_an_error_of_decode_says_where() -> None:
    rows = Stream(range(4), Files().rows, counts=COUNTS, decode=lambda n: 1 / (n - 201))
    with pytest.raises(ZeroDivisionError) as raised:
        rows[51]
    assert raised.value.__notes__ == ["quorate: in Stream, file 2 (2), row 1"]


def test_rows_that_are_asked_for_from_all_over_are_said(caplog: pytest.LogCaptureFixture) -> None:
    rows = Stream([0], lambda _: iter(range(300_000)), counts=[300_000], window=1000)
    with caplog.at_level(logging.WARNING, "quorate"):
        for n in range(stream.LOOKED_AT):
            rows[n * 4000]
    assert "reads 1000 rows for each row that training uses" in caplog.text


def test_a_fork_reads_for_itself() -> None:
    """A descriptor that two processes read from would give each half of the rows."""
    read_end, write_end = os.pipe()
    rows = Stream([0], lambda _: iter(range(40)), window=4)
    assert rows[0] == 0
    if (pid := os.fork()) == 0:
        begun = rows._open
        fine = rows[5] == 5 and rows._open is not begun
        os.write(write_end, b"1" if fine else b"0")
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(read_end, 1) == b"1"
    assert rows[5] == 5
    os.close(read_end)
    os.close(write_end)


def test_a_loop_takes_a_streams_own_order() -> None:
    rows = Stream(range(4), Files().rows, counts=COUNTS, window=8)
    assert taken(rows, Loading(), batch_size=4).loading.order is rows.order
    assert taken(DataLoader(rows, 4), Loading(), batch_size=4).loading.order is rows.order
    assert taken(rows, Loading(), batch_size=None).loading.order is None  # an evaluation: in order
    own = Windows(rows.starts, rows=3)
    assert taken(rows, Loading(order=own), batch_size=4).loading.order is own


def test_another_window_is_another_run(tmp_path: Any) -> None:
    def fit(window: int, steps: int) -> None:
        rows = Stream(range(4), Files().rows, counts=COUNTS, window=window, decode=float)
        quorate.Trainer(
            lambda: torch.nn.Linear(1, 1),
            lambda model, x: model(x[:, None].float() / 400).square().mean(),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
            batch_size=10,
            shards=2,
            devices="cpu",
            workers=1,
            run_dir=tmp_path,
        ).fit(rows, steps=steps)

    fit(8, 3)
    with expect_error(CheckpointError):
        fit(9, 4)
    fit(8, 4)
