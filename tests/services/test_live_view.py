"""The live view, drawn at several widths: nothing is cut in the middle."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from quorate.services.display.live_view import LiveView, table
from quorate.services.display.worker_rows import COLUMNS

POSITION = "epoch 1/3  step 300/705"
NUMBERS = "loss 0.3123  accuracy 0.5000  lr 0.1  3,300 examples/s"
ROWS = [
    ("0", "cuda:0 = physical 3", "87%", "2.0 of 80 GiB", "0.20 s", "33%", "waiting"),
    ("1", "cuda:1 = physical 4", "87%", "2.0 of 80 GiB", "0.50 s", "17%", "forward for 4 s"),
]


def drawn(width: int, view: LiveView | None = None, *, numbers: str = NUMBERS) -> list[str]:
    if view is None:
        view = LiveView()
        view.workers(ROWS)
    view.update(POSITION, numbers, "ETA 1:30", 300, 705)
    stream = io.StringIO()
    Console(file=stream, width=width, color_system=None).print(view)
    return [line.rstrip() for line in stream.getvalue().splitlines()]


def test_a_wide_terminal_has_all_in_a_line() -> None:
    (first, header, *_) = drawn(140)
    assert first.startswith(f"{POSITION}  ━━━")
    assert first.endswith(f"  {NUMBERS}  ETA 1:30")
    assert header.split() == [*COLUMNS]


@pytest.mark.parametrize("width", [60, 80, 95])
def test_a_usual_one_has_numbers_below_the_bar(width: int) -> None:
    first, second, *_ = drawn(width)
    assert first.startswith(f"{POSITION}  ━━━")
    assert first.endswith("  ETA 1:30")
    assert second == NUMBERS


def test_a_narrow_one_has_no_bar_and_the_columns_that_say_most() -> None:
    assert drawn(30) == [
        "epoch 1/3  step 300/705",
        "ETA 1:30",
        "loss 0.3123  accuracy 0.5000",
        "lr 0.1  3,300 examples/s",
        "worker  state",
        "0       waiting",
        "1       forward for 4 s",
    ]


@pytest.mark.parametrize("width", range(24, 130))
def test_nothing_is_cut_at_any_width(width: int) -> None:
    lines = drawn(width)
    assert not any("…" in line for line in lines)
    assert max(map(len, lines)) <= width
    shown = " ".join(" ".join(lines).split())
    for part in (*POSITION.split("  "), *NUMBERS.split("  "), "ETA 1:30", "forward for 4 s"):
        assert part in shown


@pytest.mark.parametrize(
    ("width", "left_out"),
    [
        (88, ""),
        (80, "memory"),
        (70, "memory"),
        (62, "memory use"),
        (54, "memory use waiting"),
        (40, "memory use waiting shard device"),
    ],
)
def test_the_columns_that_say_least_are_left_out_first(width: int, left_out: str) -> None:
    names = [str(column.header) for column in table(ROWS, width).columns]
    assert names == [name for name in COLUMNS if name not in left_out.split()]


def test_a_column_that_is_empty_is_none() -> None:
    rows = [("0", "cpu", "", "", "0.20 s", "33%", "waiting")]
    names = [column.header for column in table(rows, 200).columns]
    assert names == ["worker", "device", "shard", "waiting", "state"]


def test_numbers_of_another_length_do_not_move_it_to_and_fro() -> None:
    view = LiveView()
    assert len(drawn(110, view)) == 1
    assert len(drawn(110, view, numbers=NUMBERS.replace("0.3123", "123456789012345.3123"))) == 2
    assert len(drawn(110, view)) == 2  # as it was
    assert len(drawn(140, view)) == 1  # a window that was made wider
