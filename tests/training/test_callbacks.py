"""Callbacks: the order of calls, and the fate of a run after an exception in a callback."""

import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.progress import Progress
from support.messages import expect_error
from support.runs import inspected
from support.small import DATA, trainer

import quorate
from quorate import callbacks
from quorate.errors import SameBitsError


class Notes(quorate.Callback):
    def __init__(self) -> None:
        self.said: list[Any] = []

    def started(self, trainer: Any) -> None:
        self.trainer = trainer
        self.said.append(("started", trainer.global_step))

    def updated(self, report: quorate.Report) -> None:
        self.said.append(report.global_step)

    def evaluated(self, global_step: int, metrics: dict[str, float]) -> None:
        self.said.append(("evaluated", global_step, round(metrics["loss"], 6)))

    def stopped(self, reason: str) -> None:
        self.said.append(("stopped", reason))


def test_callbacks_are_told_in_order() -> None:
    notes, validation = Notes(), quorate.Validation(DATA, every_steps=2)
    trainer(None).fit(DATA, callbacks=[notes], steps=5, validation=validation)
    told = [entry[:2] if isinstance(entry, tuple) else entry for entry in notes.said]
    assert told == [
        *(("started", 0), 1, 2, ("evaluated", 2), 3, 4, ("evaluated", 4), 5, ("evaluated", 5)),
        ("stopped", "all steps are done"),
    ]


def test_an_exception_in_a_callback_ends_the_run_with_the_state_saved(tmp_path: Path) -> None:
    class Failing(Notes):
        def updated(self, report: quorate.Report) -> None:
            if report.global_step == 3:
                raise LookupError("the user's")

        def stopped(self, reason: str) -> None:
            super().stopped(reason)
            raise OSError("later")  # the first exception is raised

    notes = Failing()
    with pytest.raises(LookupError, match="the user's"):
        trainer(tmp_path).fit(DATA, epochs=2, callbacks=[notes])
    assert inspected(tmp_path)["global_step"] == 3
    assert notes.said[-1] == ("stopped", "LookupError: the user's")


# --- losses at a resume ---------------------------------------------------------------------------


class Helper:
    """A class of the script's."""

    def __init__(self) -> None:
        self.seen: list[float] = []
        self.chance = np.random.default_rng(0)


class Keeping(quorate.Callback):
    """Keeps the whole trainer, and a test's choice of values."""

    kept: Any = None

    def __init__(
        self, make: Callable[[Any], Any], change: Callable[["Keeping", quorate.Report], Any]
    ) -> None:
        self.make, self.change = make, change

    def started(self, trainer: Any) -> None:
        self.run, self.kept = trainer, self.make(trainer)

    def updated(self, report: quorate.Report) -> None:
        self.change(self, report)


def cosine(run: Any) -> torch.optim.lr_scheduler.LRScheduler:
    inner = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    return torch.optim.lr_scheduler.CosineAnnealingLR(inner, 9)


def stepped(own: Keeping, _: quorate.Report) -> None:
    own.kept.optimizer.step()
    own.kept.step()


def counted(own: Keeping, _: quorate.Report) -> None:
    own.kept += 1


SAID, DOUBTED, SILENT = 1, 2, 0  # number of messages: a doubt again in the end
KEPT: dict[str, tuple[int, Callable[..., Any], Callable[..., Any]]] = {
    "a scheduler": (DOUBTED, cosine, stepped),
    "a generator": (DOUBTED, lambda _: Helper(), lambda o, _: o.kept.chance.random()),
    "a count": (SAID, lambda _: 0, counted),
    "a list within": (SAID, lambda _: Helper(), lambda o, _: o.kept.seen.append(1.0)),
    "a tensor": (SAID, lambda _: torch.zeros(2), lambda o, _: o.kept.add_(1)),
    "what the trainer has": (SILENT, lambda r: [r, r.model, r.averaged_model], lambda *_: None),
    "a clock": (SILENT, lambda _: 0.0, lambda o, _: setattr(o, "kept", time.perf_counter())),
    "a file": (SILENT, lambda _: io.StringIO(), lambda o, _: o.kept.write("x")),
    "a bar": (SILENT, lambda _: Progress(disable=True), lambda o, _: o.kept.add_task("training")),
    "nothing": (SILENT, lambda _: {"a": [1, 2.0, "b", torch.ones(3)]}, lambda *_: None),
}


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("what", KEPT)
def test_what_a_resume_would_lose_of_a_callback_is_said(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    times, make, change = KEPT[what]
    trainer(tmp_path, 1, summary_every_s=None).fit(DATA, steps=3, callbacks=[Keeping(make, change)])
    out = capsys.readouterr().out
    line = "Keeping.kept of a callback changes during training, and no checkpoint saves it"
    assert out.count(line) == out.count("of a callback") == times
    assert (f"same bits: no, because {line}" in out) == (times == DOUBTED)
    assert ("give Keeping a state_dict() and a load_state_dict()" in out) == bool(times)


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


def test_a_strict_run_with_a_scheduler_in_a_callback_is_refused(tmp_path: Path) -> None:
    compute = quorate.Compute(strict=True)
    run = trainer(tmp_path, 1, summary_every_s=None, compute=compute)
    with expect_error(SameBitsError, name="strict"):
        run.fit(DATA, steps=4, callbacks=[Keeping(cosine, stepped)])
