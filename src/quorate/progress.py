"""Progress a person can follow: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from quorate.report import Report

LINE_EVERY_S = 5.0


class Display(Protocol):
    """Shows a run as it goes."""

    def say(self, text: str) -> None:
        """A line that stays."""

    def update(self, report: Report) -> None:
        """Called after every update; decides itself how often it shows something."""

    def close(self) -> None: ...


def display(stream: TextIO | None = None) -> Display:
    """The display that fits the stream, standard output by default."""
    stream = stream or sys.stdout
    return Bar(stream) if stream.isatty() else Lines(stream)


class Lines:
    """One line every few seconds, at the end of an epoch, and at the end."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._shown_at = time.monotonic()
        self._first = True

    def say(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def update(self, report: Report) -> None:
        now = time.monotonic()
        due = self._first or now - self._shown_at >= LINE_EVERY_S
        if due or report.ends_epoch:
            self._shown_at, self._first = now, False
            rest = "" if report.eta_s is None else f"  ETA {clock(report.eta_s)}"
            self.say(f"{position(report)}  {numbers(report)}{rest}")

    def close(self) -> None:
        pass


class Bar:
    """A progress bar with the newest numbers; what is said scrolls above it."""

    def __init__(self, stream: TextIO) -> None:
        self._progress = Progress(
            TextColumn("{task.fields[position]}"),
            BarColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            console=Console(file=stream),
            refresh_per_second=4,
        )
        self._task: TaskID | None = None

    def say(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False)

    def update(self, report: Report) -> None:
        where, what = position(report), numbers(report)
        if self._task is None:
            self._progress.start()
            self._task = self._progress.add_task(
                "", total=report.last_step, position=where, numbers=what
            )
        self._progress.update(
            self._task, completed=report.global_step, position=where, numbers=what
        )

    def close(self) -> None:
        self._progress.stop()


def position(report: Report) -> str:
    """``epoch 2/5  step 300/1,175``."""
    return (
        f"epoch {report.epoch + 1}/{report.epochs}  "
        f"step {report.global_step:,}/{report.last_step:,}"
    )


def numbers(report: Report) -> str:
    """Loss, metrics, learning rate and speed in one line."""
    speed = f"{report.examples_per_s:,.0f} examples/s"
    return f"{metrics(report.metrics)}  lr {report.lr:.3g}  {speed}"


def metrics(values: Mapping[str, float]) -> str:
    """``loss 0.3127  accuracy 0.8871``."""
    return "  ".join(f"{name} {value:.4f}" for name, value in values.items())


def clock(seconds: float) -> str:
    """``1:02:03`` or ``2:03``."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
