"""Progress: plain lines where nobody watches, a bar on a terminal."""

from __future__ import annotations

import contextlib
import io
import os
import re

from quorate.progress import Bar, Lines, clock, display
from quorate.report import Report


def report(step: int) -> Report:
    return Report(
        global_step=step,
        epoch=(step - 1) // 5,
        rows=8,
        weight=8.0,
        metrics={"loss": 1 / step, "accuracy": 0.5},
        lr=0.1,
        grad_norm=None,
        examples_per_s=1234.5,
        last_step=10,
        epochs=2,
        ends_epoch=step % 5 == 0,
        eta_s=75.0 * (10 - step),
    )


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


def test_a_terminal_gets_a_bar() -> None:
    leader, follower = os.openpty()
    with os.fdopen(follower, "w") as terminal:
        screen = display(terminal)
        assert isinstance(screen, Bar)
        screen.say("8 rows = 2 shards x 4")
        for step in range(1, 11):
            screen.update(report(step))
        screen.close()
    shown = b""
    with contextlib.suppress(OSError):  # a pseudo-terminal that nobody writes to any more
        while part := os.read(leader, 1 << 16):
            shown += part
    os.close(leader)
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode())
    assert "8 rows = 2 shards x 4" in plain
    assert "step 10/10" in plain


def test_times_are_written_as_on_a_clock() -> None:
    assert [clock(s) for s in (0, 59.6, 61, 3723)] == ["0:00", "1:00", "1:01", "1:02:03"]
