"""Progress: plain lines where nobody watches, a bar on a terminal."""

from __future__ import annotations

import contextlib
import io
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TextIO

import pytest
from rich.console import Console

from quorate.services.device_use import DeviceUse
from quorate.services.display import display as progress
from quorate.services.display.display import Bar, Display, Lines, display
from quorate.services.display.shown import Shown, clock
from quorate.services.display.worker_rows import WorkerRows, plain
from quorate.services.report import Report
from quorate.transports.worker_status import PHASES, WorkerStatus

MIB, GIB = 1 << 20, 1 << 30


def report(step: int) -> Report:
    return Report(
        global_step=step,
        epoch=(step - 1) // 5,
        rows=8,
        dropped_rows=0,
        weight=8.0,
        metrics={"loss": 1 / step, "accuracy": 0.5},
        staleness=0,
        fresh=[step],
        stale=[0],
        dropped=[0],
        worker_losses={0: (8 / step, 8.0)},
        not_finite=0,
        lr=0.1,
        grad_norm=None,
        examples_per_s=1234.5,
        last_step=10,
        epochs=2,
        ends_epoch=step % 5 == 0,
        eta_s=75.0 * (10 - step),
    )


def status(number: int, shards: int, *, phase: str = "waiting", for_s: float = 0.0) -> WorkerStatus:
    """A worker on a GPU of its own: per shard 0.1 s waiting, and 0.2 s forward; worker 2 0.5 s."""
    seconds = dict.fromkeys(PHASES, 0.0)
    seconds |= {"waiting": 0.1 * shards, "forward": (0.5 if number == 2 else 0.2) * shards}
    since = time.monotonic() - for_s
    return WorkerStatus(number, f"cuda:{number}", 99, None, phase, 0, 0, since, seconds, shards)


def three(shards: int) -> list[WorkerStatus]:
    return [status(number, shards) for number in range(3)]


def gpu(number: int) -> DeviceUse:
    return DeviceUse(number, f"cuda:{number}", f"physical {number + 3}", 0.87, 2 * GIB, 80 * GIB)


class Terminal:
    """A pseudo-terminal, wide and high enough, and what was written to it."""

    def __init__(self) -> None:
        self._leader, follower = os.openpty()
        self.file = os.fdopen(follower, "w")
        self._shown = b""
        self._reader = threading.Thread(target=self._read)  # it holds but little
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # nobody writes to it any more
            while part := os.read(self._leader, 1 << 16):
                self._shown += part

    def close(self) -> None:
        self.file.close()
        self._reader.join()
        os.close(self._leader)

    @property
    def written(self) -> str:
        return self._shown.decode()

    @property
    def plain(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.written)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("LINES", "40")
    monkeypatch.setenv("TERM", "xterm-256color")
    made = Terminal()
    yield made
    if not made.file.closed:
        made.close()


def test_lines_show_the_first_step_and_the_end_of_each_epoch() -> None:
    stream = io.StringIO()
    lines = Lines(stream)
    for step in range(1, 11):
        lines.update(report(step))
    lines.close()
    shown = stream.getvalue().splitlines()
    assert len(shown) == 3
    assert shown[0] == (
        "epoch 1/2  step 1/10  loss 1.0000  accuracy 0.5000  lr 0.1  1,234 examples/s  ETA 11:15"
    )
    assert shown[2].startswith("epoch 2/2  step 10/10  loss 0.1000")


def test_a_terminal_gets_a_bar(terminal: Terminal) -> None:
    screen = display(terminal.file)
    assert isinstance(screen, Bar)
    screen.say("8 rows = 2 shards x 4")
    for step in range(1, 11):
        screen.update(report(step))
    screen.close()
    terminal.close()
    assert "8 rows = 2 shards x 4" in terminal.plain
    assert "step 10/10" in terminal.plain


def test_what_is_printed_without_an_end_of_line_is_shown_as_it_is(terminal: Terminal) -> None:
    """As a second bar does. Nothing in it is a tag, and it has the colours that it came with."""
    screen = display(terminal.file)
    screen.update(report(1))
    for text in ("[b]7[/b] [/i]", ":smile: 0.25"):
        print(text, end="", flush=True)
    screen.close()
    terminal.close()
    assert "[b]7[/b] [/i]" in terminal.written
    assert ":smile: 0.25" in terminal.written


def test_a_terminal_that_cannot_go_back_gets_lines(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    screen = display(terminal.file)
    screen.update(report(1))
    terminal.close()
    assert terminal.plain.startswith("epoch 1/2  step 1/10  loss 1.0000")


def test_a_terminal_has_the_table_below_the_bar(terminal: Terminal) -> None:
    screen = display(terminal.file)
    screen.workers(three(2), [])  # before there is a bar
    screen.update(report(1))
    screen.workers(three(40), [gpu(number) for number in range(3)])
    screen.update(report(2))
    screen.close()
    screen.workers(three(80), [])  # a service that comes too late
    terminal.close()
    lines = [line.rstrip() for line in terminal.plain.splitlines()]
    assert not any("slow" in line for line in lines)
    bar = max(number for number, line in enumerate(lines) if "step 2/10" in line)
    assert lines[bar + 1 : bar + 5] == [
        "worker  device               use  memory         shard   waiting  state",
        "0       cuda:0 = physical 3  87%  2.0 of 80 GiB  0.20 s  33%      waiting",
        "1       cuda:1 = physical 4  87%  2.0 of 80 GiB  0.20 s  33%      waiting",
        "2       cuda:2 = physical 5  87%  2.0 of 80 GiB  0.50 s  17%      waiting",
    ]


@pytest.mark.parametrize(("after_s", "tables"), [(progress.TABLE_AFTER_S, 0), (0.0, 1)])
def test_a_log_of_less_than_a_minute_has_a_table_at_its_end_alone(
    after_s: float, tables: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one of a few seconds has none."""
    monkeypatch.setattr(progress, "TABLE_AFTER_S", after_s)
    stream = io.StringIO()
    lines = Lines(stream)
    for shards in (2, 4, 6):
        lines.workers(three(shards), [])
    assert stream.getvalue() == ""
    lines.close()
    assert stream.getvalue().count("worker  device") == tables
    assert stream.getvalue().count("\n") == 4 * tables


def test_a_long_log_has_a_table_once_in_a_while_and_at_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress, "TABLE_EVERY_S", 0.2)
    stream = io.StringIO()
    lines = Lines(stream)
    lines.workers(three(2), [])
    assert stream.getvalue() == ""
    time.sleep(0.2)
    lines.workers(three(4), [])
    lines.workers(three(5), [])
    lines.workers(three(6), [])
    assert stream.getvalue().splitlines() == [
        "worker  device  use  memory  shard   waiting  state",
        "0       cuda:0               0.20 s  33%      waiting",
        "1       cuda:1               0.20 s  33%      waiting",
        "2       cuda:2               0.50 s  17%      waiting",
    ]
    lines.close()
    assert stream.getvalue().count("worker  device") == 2
    lines.close()
    assert stream.getvalue().count("worker  device") == 2


@pytest.mark.parametrize("quiet", [False, True])
@pytest.mark.parametrize("on_terminal", [False, True])
def test_a_quiet_run_mentions_nothing(quiet: bool, on_terminal: bool, terminal: Terminal) -> None:
    plain_stream, shown = io.StringIO(), Shown(quiet=quiet)
    screen: Display = Lines(plain_stream, shown)
    if on_terminal:
        screen = Bar(Console(file=terminal.file), shown)
    screen.mention("slow workers: worker 1")
    screen.say("saved")
    screen.close()
    terminal.close()
    written = terminal.plain if on_terminal else plain_stream.getvalue()
    assert written.splitlines() == ["saved"] if quiet else ["slow workers: worker 1", "saved"]


@pytest.mark.parametrize("on_terminal", [False, True])
def test_two_threads_may_show_something_at_once(
    on_terminal: bool, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "TABLE_EVERY_S", 0.0)
    plain_stream = io.StringIO()
    stream: TextIO = terminal.file if on_terminal else plain_stream
    screen = display(stream)

    def serve() -> None:
        for shards in range(100):
            screen.workers(three(shards), [])

    service = threading.Thread(target=serve)
    service.start()
    for step in range(1, 101):
        screen.update(report(step))
        screen.say(f"{step} " + "said " * 9)
    service.join()
    screen.close()
    terminal.close()
    shown = terminal.plain if on_terminal else plain_stream.getvalue()
    lines = [line.rstrip() for line in shown.splitlines()]
    for step in range(1, 101):
        assert f"{step} {'said ' * 9}".rstrip() in lines
    if not on_terminal:
        assert lines.count("worker  device  use  memory  shard   waiting  state") == 99


def table(workers: Sequence[WorkerStatus], uses: Sequence[DeviceUse]) -> list[list[str]]:
    """Cells of a first table."""
    return [list(row) for row in WorkerRows().rows(workers, uses, time.monotonic())]


def test_cells_of_the_table() -> None:
    cpu = status(1, 4)._replace(device="cpu")
    uses = [
        DeviceUse(0, "cuda:0", "physical 3", None, None, None),
        DeviceUse(1, "cpu", None, 0.97, 412 * MIB, None),
        DeviceUse(2, "cuda:2", None, 0.004, 1000 * MIB, 8 * GIB),
    ]
    assert table([status(0, 4), cpu, status(2, 0)], uses) == [
        ["0", "cuda:0 = physical 3", "", "", "0.20 s", "33%", "waiting"],
        ["1", "cpu", "1.0 core", "412 MiB", "0.20 s", "33%", "waiting"],
        ["2", "cuda:2", "0%", "1.0 of 8 GiB", "", "", "waiting"],
    ]
    assert plain([]) == "worker  device  use  memory  shard  waiting  state"


@pytest.mark.parametrize(
    ("shards", "phase", "for_s", "is_gone", "shown"),
    [
        (4, "forward", 0.5, False, "forward"),
        (4, "forward", 0.9, False, "forward"),  # 3 times 0.2 s, and yet no time to speak of
        (4, "forward", 12.0, False, "forward for 12 s"),
        (0, "starting", 8.0, False, "starting"),
        (0, "starting", 12.0, False, "starting for 12 s"),
        (4, "starting", 2.5, True, "gone for 2.50 s"),
    ],
)
def test_a_state_that_lasts_is_shown_with_its_time(
    shards: int, phase: str, for_s: float, is_gone: bool, shown: str
) -> None:
    worker = status(0, shards, phase=phase, for_s=for_s)
    if is_gone:
        worker = worker._replace(pid=None)
    assert table([worker], [])[0][-1] == shown


def test_figures_are_of_the_time_since_the_last_ones() -> None:
    rows = WorkerRows()
    first, slower = status(0, 10), status(0, 12)
    slower.seconds["forward"] += 2.0
    idle = slower._replace(seconds=slower.seconds | {"waiting": slower.seconds["waiting"] + 5})
    shown = [rows.rows([each], [], time.monotonic())[0][4:6] for each in (first, slower, idle)]
    assert shown == [("0.20 s", "33%"), ("1.20 s", "8%"), ("1.20 s", "100%")]


def test_times_are_written_as_on_a_clock() -> None:
    assert [clock(s) for s in (0, 59.6, 61, 3723)] == ["0:00", "1:00", "1:01", "1:02:03"]
