"""Windows: an order that reads few places of few files at a time, and has each row once.

Legend: R rows of the dataset, F files.
"""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.messages import expect_error

from quorate.coordination.plan import Plan, permutation
from quorate.data.streams import Windows, windows
from quorate.errors import SettingError

fixed = settings(max_examples=150, derandomize=True, deadline=None, database=None)


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=8).filter(any),
    st.integers(1, 12),
    st.integers(1, 3),
    st.integers(0, 5),
)
@fixed
def test_an_epoch_has_each_row_once_window_by_window(
    counts: list[int], size: int, files: int, epoch: int
) -> None:
    starts = np.cumsum([0, *counts])
    order = Windows(starts, rows=size, files=files)
    shuffled = permutation(int(starts[-1]), 3, epoch)
    rows = order(shuffled)
    assert sorted(rows.tolist()) == list(range(int(starts[-1])))
    turns: dict[int, int] = {}  # of files, as their first rows come
    for row in shuffled:
        turns.setdefault(int(np.searchsorted(starts, row, side="right")) - 1, len(turns))
    places = []
    for row in rows:
        file = int(np.searchsorted(starts, row, side="right")) - 1
        places.append((turns[file] // files, (row - starts[file]) // size))
    assert places == sorted(places)
    # Within a place rows are in the order that they came in.
    came = {row: at for at, row in enumerate(shuffled.tolist())}
    for at in range(1, len(rows)):
        if places[at] == places[at - 1]:
            assert came[int(rows[at - 1])] < came[int(rows[at])]
    batch = min(4, len(rows))
    plan = Plan(rows=len(rows), batch_size=batch, shards=1, seed=3, order=order)
    steps = range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch)
    assert np.array_equal(np.concatenate([plan.batch(step) for step in steps]), rows)


def test_two_epochs_have_other_orders_of_files_and_of_rows() -> None:
    order = Windows([0, 40, 80, 120], rows=10)
    one, other = (order(permutation(120, 0, epoch)) for epoch in (0, 1))
    assert [row // 40 for row in one[::40]] != [row // 40 for row in other[::40]]
    assert all(
        len({row // 10 for row in one[at : at + 10].tolist()}) == 1 for at in range(0, 120, 10)
    )
    assert sorted(one[:10].tolist()) != one[:10].tolist()
    assert np.array_equal(one, order(permutation(120, 0, 0)))


def test_rows_that_are_there_twice_stay_in_their_window() -> None:
    order = Windows([0, 4, 8], rows=2)
    assert order(np.array([7, 1, 1, 6, 0, 7, 3])).tolist() == [7, 6, 7, 1, 1, 0, 3]


def test_what_it_depends_on_has_a_hash() -> None:
    others = [
        Windows([0, 4, 8], rows=3),
        Windows([0, 5, 8], rows=2),
        Windows([0, 4, 8], rows=2, files=2),
    ]
    assert len({order.sha256 for order in [Windows([0, 4, 8], rows=2), *others]}) == 4


def test_wrong_windows_are_refused() -> None:
    with expect_error(SettingError, name="Windows.rows", got=0):
        Windows([0, 3], rows=0)
    with expect_error(SettingError, name="windows(dataset)", got="list"):
        windows([1, 2])
