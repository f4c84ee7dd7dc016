"""Streams: rows, each by number, of files readable only from their beginnings."""

import json
import os
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import fixed
from support.fits import fit
from support.messages import expect_error
from torch import nn
from torch.utils.data import DataLoader

from quorate.data.streams import LinesDataset, Stream, Windows, windows
from quorate.errors import DataError, SettingError

COUNTS = [50, 0, 7, 33]
EXPECTED = [100 * file + place for file in range(4) for place in range(COUNTS[file])]


class Files:
    """Files of numbers, with notes on how the files are read."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.read = 0

    def rows(self, file: int, start: int = 0) -> Iterator[int]:
        self.begun.append(file)
        for place in range(start, COUNTS[file]):
            self.read += 1
            yield 100 * file + place


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
    for epoch in range(2):
        files.begun, files.read = [], 0
        order = rows.order(np.random.default_rng(epoch).permutation(90))
        assert sorted(rows[int(n)] for n in order) == EXPECTED
        assert sorted(files.begun) == [0, 2, 3]
        assert files.read == 90
    # From the middle of an epoch, earlier rows are passed over, or need not be.
    for skips, most in ((False, 90), (True, 90 - 60 + 3 * 8)):
        files = Files()
        begin = files.rows if skips else partial(files.rows, start=0)
        rows = Stream(range(4), begin, counts=COUNTS, window=8, files_at_once=2, skips=skips)
        assert [rows[int(n)] for n in order[60:]] == [EXPECTED[int(n)] for n in order[60:]]
        assert files.read <= most


def test_what_is_drawn_while_rows_are_read_follows_from_their_window() -> None:
    def drawing(file: int) -> Iterator[tuple[float, ...]]:
        for _ in range(COUNTS[file]):
            yield random.random(), float(np.random.rand()), torch.rand(()).item()

    def all_of(asked: list[int]) -> dict[int, tuple[float, ...]]:
        rows = Stream(range(4), drawing, counts=COUNTS, window=8)
        random.random()
        return {n: rows[n] for n in asked}

    found = all_of([*range(90)])
    assert all_of([*range(89, -1, -1)]) == found
    assert [len({*drawn}) for drawn in zip(*found.values(), strict=True)] == [90] * 3


def trained(data: Any, **settings: Any) -> list[list[Any]]:
    """Train for two epochs, and return the rows of all shards, with the numbers drawn by decode."""
    seen: list[list[Any]] = []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        seen.extend(torch.stack([column.double() for column in batch], 1).tolist())
        return model(batch[0][:, None].float() / 400).square().mean()

    settings = {"epochs": 2, "batch_size": 10, "shards": 2, "spot_check_every": 0} | settings
    fit(lambda: nn.Linear(1, 1), loss, data, **settings)
    return seen


def decoded(n: int) -> tuple[int, torch.Tensor]:
    return n, torch.rand(())


def test_a_training_takes_a_streams_own_order_and_draws_belong_to_row_and_epoch() -> None:
    """A loader of the stream too; the user's own order has priority."""

    def stream(files: Files) -> Stream:
        return Stream(range(4), lambda f: files.rows(f), counts=COUNTS, window=8, decode=decoded)

    def drawn(make: Any = lambda rows: rows, **settings: Any) -> tuple[set[Any], int]:
        files = Files()
        rows = trained(make(stream(files)), **settings)
        return {tuple(row) for row in rows}, len(files.begun)

    expected, begun = drawn(workers=1)
    assert sorted(row for row, _ in expected) == sorted(EXPECTED * 2)
    assert len({number for _, number in expected}) == 180
    assert begun <= 2 * 3 + 2  # beside the shard tried first
    assert drawn(workers=3)[0] == expected
    again, begun = drawn(lambda rows: DataLoader(rows, 10), workers=1)
    assert (again, begun <= 8) == (expected, True)
    other, begun = drawn(order=lambda rows: rows[::-1], workers=1)
    assert (other, begun > 8) == (expected, True)


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
    failing = Stream(range(4), Files().rows, counts=COUNTS, decode=lambda n: 1 / (n - 201))
    with pytest.raises(ZeroDivisionError) as raised:
        failing[51]
    assert raised.value.__notes__ == ["quorate: in Stream, file 2 (2), row 1"]


def test_a_fork_reads_for_itself() -> None:
    """A descriptor shared by two processes would give half of the rows to each."""
    begun: list[int] = []

    def begin(file: int) -> Iterator[int]:
        begun.append(file)
        yield from range(40)

    rows = Stream([0], begin, window=4)
    assert rows[0] == 0
    before = len(begun)
    if (pid := os.fork()) == 0:
        os._exit(0 if rows[5] == 5 and len(begun) == before + 1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert rows[5] == 5
    assert len(begun) == before


def test_one_thread_at_a_time_reads() -> None:
    """Towers and evaluations have a common stream; its files are at one place each."""
    inside: list[int] = []
    together: list[list[int]] = []

    def begin(file: int) -> Iterator[int]:
        inside.append(file)
        time.sleep(0.05)  # for the second thread to come
        together.append([*inside])
        inside.remove(file)
        yield from range(COUNTS[file])

    rows = Stream(range(4), begin, counts=COUNTS)
    both = threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda row: (both.wait(), rows[row]), (0, 60)))
    assert sorted(together) == [[0], [3]]


# --- windows --------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=8).filter(any),
    st.integers(1, 12),
    st.integers(1, 3),
    st.integers(0, 5),
)
@fixed(60)
def test_an_epoch_has_each_row_once_window_by_window(
    counts: list[int], size: int, files: int, seed: int
) -> None:
    starts = np.cumsum([0, *counts])
    shuffled = np.random.default_rng(seed).permutation(starts[-1])
    file_of = {int(row): int(np.searchsorted(starts, row, side="right")) - 1 for row in shuffled}
    turns: dict[int, int] = {}  # of files, as their first rows come
    for row in shuffled:
        turns.setdefault(file_of[row], len(turns))

    def place(row: int) -> tuple[int, int]:
        return turns[file_of[row]] // files, int(row - starts[file_of[row]]) // size

    # Within a place rows stay in their order of arrival.
    expected = sorted(map(int, shuffled), key=place)
    assert Windows(starts, rows=size, files=files)(shuffled).tolist() == expected


def test_windows_by_hand_and_what_they_depend_on() -> None:
    order = Windows([0, 4, 8], rows=2)  # repeated rows stay in their window
    assert order(np.array([7, 1, 1, 6, 0, 7, 3])).tolist() == [7, 6, 7, 1, 1, 0, 3]
    others = [Windows([0, 4, 8], rows=3), Windows([0, 5, 8], rows=2)]
    others.append(Windows([0, 4, 8], rows=2, files=2))
    assert len({each.sha256 for each in [order, *others]}) == 4
    with expect_error(SettingError, name="Windows.rows", got=0):
        Windows([0, 3], rows=0)
    with expect_error(SettingError, name="windows(dataset)", got="list"):
        windows([1, 2])


# --- lines ----------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from([b"", b"\r", b"a", b"bc\r", b" ", b"\r\r"])), st.booleans())
@fixed()
def test_lines_are_pythons_but_for_empty_ones(
    tmp_path_factory: pytest.TempPathFactory, parts: list[bytes], has_end: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.txt"
    content = b"first\n" + b"\n".join(parts) + (b"\n" if has_end else b"")
    path.write_bytes(content)
    rows = LinesDataset(path, bytes)
    expected = [line.removesuffix(b"\r") for line in content.split(b"\n")]
    assert [rows[n] for n in range(len(rows))] == [*filter(None, expected)]


@pytest.mark.parametrize("before", [0, 1, 2])
def test_lines_are_the_same_at_any_border_of_what_is_read_at_a_time(
    tmp_path: Path, before: int
) -> None:
    """Pieces are of 4 MB: a border is before, in and after the end of a line."""
    long = b"x" * ((1 << 22) - before)
    path = tmp_path / "long.txt"
    path.write_bytes(long + b"\r\n\r\nab\r\n\nc")
    rows = LinesDataset(path, bytes)
    assert [rows[n] for n in range(len(rows))] == [long, b"ab", b"c"]


def test_an_error_of_parse_has_its_place(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"n": 1}\n{"n": \n')
    rows = LinesDataset(path, json.loads)
    assert rows[0] == {"n": 1}
    with pytest.raises(json.JSONDecodeError) as raised:
        rows[1]
    assert raised.value.__notes__ == [f"quorate: in {path}, row 1, at byte 9"]
