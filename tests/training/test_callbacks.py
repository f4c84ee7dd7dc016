"""Callbacks: when each is told what, and what becomes of a run when one raises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.small import DATA, trainer

import quorate
from quorate.services.checkpoints import files
from quorate.services.report import Report


class Notes(quorate.Callback):
    def __init__(self) -> None:
        self.said: list[Any] = []

    def started(self, trainer: Any) -> None:
        self.trainer = trainer
        self.said.append(("started", trainer.global_step))

    def updated(self, report: Report) -> None:
        self.said.append(report.global_step)

    def evaluated(self, global_step: int, metrics: dict[str, float]) -> None:
        self.said.append(("evaluated", global_step, round(metrics["loss"], 6)))

    def stopped(self, reason: str) -> None:
        self.said.append(("stopped", reason))


def test_callbacks_are_told_in_order() -> None:
    notes = Notes()
    run = trainer(None)
    run.fit(
        DATA,
        callbacks=[notes],
        steps=5,
        validation=quorate.Validation(DATA, every_steps=2),
    )
    plain = [entry for entry in notes.said if not isinstance(entry, tuple) or len(entry) == 2]
    assert plain == [("started", 0), 1, 2, 3, 4, 5, ("stopped", "all steps are done")]
    evaluated = [entry[1] for entry in notes.said if isinstance(entry, tuple) and len(entry) == 3]
    assert evaluated == [2, 4, 5]


def test_early_stopping_is_a_callback() -> None:
    class EarlyStopping(Notes):
        def evaluated(self, global_step: int, metrics: dict[str, float]) -> None:
            if global_step >= 4:
                self.trainer.stop("no better for long")

    notes = EarlyStopping()
    run = trainer(None)
    run.fit(
        DATA,
        callbacks=[notes],
        epochs=50,
        validation=quorate.Validation(DATA, every_steps=2),
    )
    assert run.global_step in (4, 5)
    assert notes.said[-1] == ("stopped", "no better for long")


def test_an_exception_in_a_callback_ends_the_run_with_the_state_saved(tmp_path: Path) -> None:
    class Failing(Notes):
        def updated(self, report: Report) -> None:
            if report.global_step == 3:
                raise LookupError("the user's")

        def stopped(self, reason: str) -> None:
            super().stopped(reason)
            raise OSError("later")  # the first exception is the one that is raised

    notes = Failing()
    with pytest.raises(LookupError, match="the user's"):
        trainer(tmp_path).fit(DATA, epochs=2, callbacks=[notes])
    found = files.find(tmp_path)
    assert found is not None
    assert found.record["global_step"] == 3
    assert notes.said[-1] == ("stopped", "LookupError: the user's")
