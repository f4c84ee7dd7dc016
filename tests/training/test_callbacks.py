"""Callbacks: when each is told what, and what becomes of a run when one raises."""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.progress import Progress
from support.messages import expect_error
from support.small import DATA, trainer
from torch.utils.data import Dataset

import quorate
from quorate import callbacks
from quorate.errors import SameBitsError
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


# --- what a resume would lose ---------------------------------------------------------------------


class Helper:
    """A class of the script's."""

    def __init__(self) -> None:
        self.seen: list[float] = []
        self.chance = np.random.default_rng(0)


class Cached(Dataset[int]):
    def __init__(self) -> None:
        self.cache: list[int] = []

    def __len__(self) -> int:
        return 1

    def __getitem__(self, row: int) -> int:
        self.cache.append(row)
        return row


class Keeping(quorate.Callback):
    """Keeps all of the trainer, and what a test makes of that."""

    kept: Any = None

    def __init__(
        self,
        make: Callable[[quorate.Run], Any],
        change: Callable[[Keeping, Report], Any],
    ) -> None:
        self.make, self.change = make, change

    def started(self, trainer: quorate.Run) -> None:
        self.run, self.kept = trainer, self.make(trainer)

    def updated(self, report: Report) -> None:
        self.change(self, report)


class Stepping(Keeping):
    """Reads ``global_step``."""

    def saved(self, global_step: int, path: Path) -> None:
        assert global_step <= self.run.global_step


def cosine(run: quorate.Run) -> torch.optim.lr_scheduler.LRScheduler:
    inner = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    return torch.optim.lr_scheduler.CosineAnnealingLR(inner, 9)


def stepped(own: Keeping, _: Report) -> None:
    own.kept.optimizer.step()
    own.kept.step()


def counted(own: Keeping, _: Report) -> None:
    own.kept += 1


LOST: dict[str, tuple[Callable[..., Any], Callable[..., Any], bool]] = {
    "a scheduler": (cosine, stepped, True),
    "schedulers": (lambda r: {"a": [cosine(r)]}, lambda o, _: o.kept["a"][0].step(), True),
    "a generator": (lambda _: Helper(), lambda o, _: o.kept.chance.random(), True),
    "a module": (
        lambda _: torch.nn.Linear(1, 1),
        lambda o, _: o.kept.weight.data.add_(1),
        True,
    ),
    "a count": (lambda _: 0, counted, False),
    "a list": (lambda _: [], lambda o, r: o.kept.append(r.metrics["loss"]), False),
    "a list within": (lambda _: Helper(), lambda o, r: o.kept.seen.append(1.0), False),
    "a tensor": (lambda _: torch.zeros(2), lambda o, _: o.kept.add_(1), False),
}


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("what", LOST)
def test_what_a_resume_would_lose_of_a_callback_is_said(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, change, is_doubt = LOST[what]
    trainer(tmp_path, 1, summary_every_s=None).fit(DATA, steps=3, callbacks=[Keeping(make, change)])
    out = capsys.readouterr().out
    line = "Keeping.kept of a callback changes during training, and no checkpoint saves it"
    assert out.count(line) == 1 + is_doubt  # a doubt is said again in the end
    assert (f"same bits: no, because {line}" in out) == is_doubt
    assert "give Keeping a state_dict() and a load_state_dict()" in out
    assert "Keeping.run" not in out


SILENT: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "what the trainer has": (
        lambda r: [r, r.model, r.param_groups, r.averaged_model],
        lambda o, r: None,
    ),
    "what is made in the first update": (
        lambda _: None,
        lambda o, r: setattr(o, "kept", [1, 2]) if o.kept is None else None,
    ),
    "a clock": (lambda _: 0.0, lambda o, r: setattr(o, "kept", time.perf_counter())),
    "the step": (lambda r: r.global_step, lambda o, r: setattr(o, "kept", r.global_step)),
    "a file": (lambda _: io.StringIO(), lambda o, r: o.kept.write("x")),
    "a bar": (
        lambda _: Progress(disable=True),
        lambda o, r: o.kept.add_task("training"),
    ),
    "a logger": (
        lambda _: logging.getLogger("a test"),
        lambda o, r: o.kept.setLevel(r.global_step),
    ),
    "a dataset": (lambda _: Cached(), lambda o, r: o.kept[0]),
    "nothing": (lambda _: {"a": [1, 2.0, "b", torch.ones(3)]}, lambda o, r: None),
}


@pytest.mark.parametrize("what", SILENT)
def test_what_a_resume_makes_again_is_not_said(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, change = SILENT[what]
    kind = Stepping if what == "the step" else Keeping
    trainer(tmp_path, 1, summary_every_s=None).fit(DATA, steps=3, callbacks=[kind(make, change)])
    assert "of a callback" not in capsys.readouterr().out


def test_callbacks_that_save_their_state_and_those_of_quorate_are_silent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Saving(Keeping):
        def state_dict(self) -> dict[str, Any]:
            return {"count": self.kept}

    ours = [
        callbacks.EarlyStopping(),
        callbacks.LogLines(every_steps=1),
        callbacks.LearningRateMonitor(every_steps=1),
        callbacks.Samples(lambda run: {"text": "a text"}),
    ]
    validation = quorate.Validation(DATA, every_steps=1)
    mine = [*ours, Saving(lambda _: 0, counted)]
    trainer(tmp_path, 1).fit(DATA, steps=4, validation=validation, callbacks=mine)
    assert "of a callback" not in capsys.readouterr().out
    trainer(None, 1).fit(DATA, steps=4, callbacks=[Keeping(lambda _: 0, counted)])
    assert "of a callback" not in capsys.readouterr().out  # nothing is to be resumed


def test_a_strict_run_with_a_scheduler_in_a_callback_is_refused(tmp_path: Path) -> None:
    compute = quorate.Compute(strict=True)
    run = trainer(tmp_path, 1, summary_every_s=None, compute=compute)
    with expect_error(SameBitsError, name="strict"):
        run.fit(DATA, steps=4, callbacks=[Keeping(cosine, stepped)])
