"""What of a run is shown: the forms of a line, how often, and nothing where quiet was asked for."""

from __future__ import annotations

import io
import json
import math
import re
from typing import Any

import pytest
from support.messages import expect_error

from quorate.errors import SettingError
from quorate.services.display.display import Bar, Lines, display
from quorate.services.display.shown import Shown
from quorate.services.report import Report
from quorate.settings import overriding

DATE = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[+-]\d{4}"


def report(step: int, loss: float = 0.5, eta_s: float | None = 75.0) -> Report:
    return Report(
        global_step=step,
        epoch=0,
        rows=8,
        dropped_rows=0,
        weight=8.0,
        metrics={"loss": loss},
        worker_losses={},
        staleness=0,
        fresh=[step],
        stale=[0],
        dropped=[0],
        not_finite=0,
        lr=0.1,
        grad_norm=None,
        examples_per_s=100.0,
        last_step=10,
        epochs=1,
        ends_epoch=step == 10,
        eta_s=eta_s,
    )


def shown(reports: list[Report], said: str = "hello", **typed: Any) -> list[str]:
    """What a run shows that is not on a terminal, if this was typed at the command."""
    stream = io.StringIO()
    with overriding(typed):
        screen = display(stream)
    screen.say(said)
    for each in reports:
        screen.update(each)
    screen.close()
    return stream.getvalue().splitlines()


def steps(lines: list[str]) -> list[int]:
    return [int(found[1]) for line in lines if (found := re.search(r"step (\d+)/10", line))]


def test_a_line_has_units_and_a_date_where_that_is_asked_for() -> None:
    plain = "epoch 1/1  step 1/10  loss 0.5000  lr 0.1  100 examples/s"
    assert shown([report(1)]) == ["hello", f"{plain}  ETA 1:15"]
    said, line = shown([report(1)], log_format="dated")
    assert re.fullmatch(f"{DATE}  hello", said)
    unit = re.escape(plain.replace("1/10", "1/10 updates"))
    assert re.fullmatch(f"{DATE}  {unit}  ETA 75 s", line)
    table = shown([], said="one\ntwo", log_format="dated")
    assert [re.sub(DATE, "", line) for line in table] == ["  one", "  two"]


def test_json_is_an_object_per_line_and_has_no_nan() -> None:
    lines = [*map(json.loads, shown([report(1), report(10, math.nan, None)], log_format="json"))]
    assert lines[0]["said"] == "hello"
    assert (lines[1]["global_step"], lines[1]["metrics"], lines[1]["eta_s"]) == (
        *(1, {"loss": 0.5}),
        75.0,
    )
    assert (lines[2]["metrics"], lines[2]["eta_s"]) == ({"loss": None}, None)
    assert all(re.fullmatch(DATE, line["at"]) for line in lines)


def test_lines_come_as_often_as_they_were_asked_for() -> None:
    every = [report(step) for step in range(1, 11)]
    assert steps(shown(every)) == [1, 10]
    assert steps(shown(every, log_every=3)) == [3, 6, 9]
    assert shown(every, quiet=True) == ["hello"]
    assert steps(shown(every, quiet=True, log_every=5)) == [5, 10]


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("typed", "kind"),
    [
        ({}, Bar),
        ({"log_format": "dated"}, Bar),
        ({"quiet": True}, Lines),
        ({"log_format": "json"}, Lines),
    ],
)
def test_there_is_a_bar_on_a_terminal_but_where_it_is_not_wanted(
    typed: dict[str, Any], kind: type
) -> None:
    with overriding(typed):
        assert type(display(Terminal())) is kind


def test_lines_that_were_asked_for_stand_above_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    stream = Terminal()
    with overriding({"log_every": 4, "log_format": "dated"}):
        screen = display(stream)
    for step in range(1, 11):
        screen.update(report(step))
    screen.close()
    lines = [line for line in stream.getvalue().splitlines() if re.search(f"{DATE}  epoch", line)]
    assert steps(lines) == [4, 8]


@pytest.mark.parametrize(
    ("name", "got"),
    [("log_every", 0), ("log_format", "jsn")],
)
def test_what_cannot_be_shown_is_refused(name: str, got: object) -> None:
    with overriding({name: got}), expect_error(SettingError, name=name, got=got):
        display(io.StringIO())
    assert Shown().line("x") == "x"
