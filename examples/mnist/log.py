"""The tutorial's log line: step, loss, examples per second, seconds per batch."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any

import quorate


class Log(quorate.Callback):
    """A line every so many updates.

    ``Trainer`` takes it as a callback; a loop of one's own calls ``step``.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self.steps = 0
        self._rows, self._began = 0, time.perf_counter()  # since the line before, for ``step``

    def started(self, trainer: Any) -> None:
        """A run may go on."""
        self.steps = trainer.global_step

    def updated(self, report: quorate.Report) -> None:
        """Of all replicas: their mean loss, the rows of all."""
        self.steps = report.global_step
        if self.steps % self.every == 0:
            self._print(report.loss, report.rows, report.examples_per_s)

    def step(self, loss: float, rows: int) -> None:
        """An update was made of so many rows."""
        self.steps += 1
        self._rows += rows
        if self.steps % self.every == 0:
            now = time.perf_counter()
            self._print(loss, rows, self._rows / (now - self._began))
            self._rows, self._began = 0, now

    def _print(self, loss: float, rows: int, examples_per_s: float) -> None:
        # A step of the tutorial was a batch for each tower, and a step here is one batch for all
        # workers: seconds per batch are those of an update.
        print(
            f"{datetime.now()}: step {self.steps}, loss = {loss:.2f} "
            f"({examples_per_s:.1f} examples/sec; {rows / examples_per_s:.3f} sec/batch)",
            flush=True,
        )
