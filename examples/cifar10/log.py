"""The tutorial's log lines: session started, loss and accuracy now and then, finished."""

from __future__ import annotations

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

    def started(self, trainer: Any) -> None:
        """A run may go on."""
        self.steps = trainer.global_step
        self.say("Session started.")

    def updated(self, report: quorate.Report) -> None:
        """Of all replicas: their mean loss and accuracy."""
        self.steps = report.global_step - 1
        self.step(report.loss, report.metrics["accuracy"])

    def stopped(self, reason: str) -> None:  # noqa: ARG002
        """Training is over."""
        self.say("Finished training.")

    def step(self, loss: float, accuracy: float) -> None:
        """An update was made."""
        self.steps += 1
        if self.steps % self.every == 0:
            self.say(
                f"After {self.steps} steps training, loss / accuracy on training batch is "
                f"{loss:g} / {accuracy:g}."
            )

    def say(self, line: str) -> None:
        """Print a line, with the time."""
        print(f"{datetime.now()}: {line}", flush=True)
