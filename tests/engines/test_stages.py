"""A replica in stages: the bits of a replica in one piece, and a line for each impossible case."""

import os
import random
import re
import signal
import sys
from collections.abc import Callable
from itertools import islice
from multiprocessing import active_children, current_process
from pathlib import Path
from threading import current_thread
from typing import Any

import pytest
import torch
from scripts import everything
from support import front_door, traces
from support.digests import digest_of
from support.fits import fit
from support.messages import expect_error
from support.references import References
from support.runs import command, digests, inspected, run
from support.trainings.faults import MISDEEDS, fail
from torch import nn

import quorate
from quorate.errors import ExitError, QuorateError, SettingError, UserError


def trained(
    *split: str, devices: str = "cpu+cpu", loss: Any = everything.loss, **options: Any
) -> str:
    """Make three updates in stages; return the digest."""
    torch.manual_seed(3)
    defaults: dict[str, Any] = {"batch_size": 24, "shards": 4, "clip_norm": 1.0, "ema_decay": 0.99}
    defaults["workers"] = quorate.Workers(1, engine="towers")
    trainer = front_door.trainer(
        everything.Everything(),
        loss,
        optimizer=lambda params: torch.optim.Adam(params, lr=3e-3),
        devices=devices,
        split=list(split) or None,
        **defaults | options,
    )
    for _ in islice(trainer.updates(everything.Sentences(110), epochs=1), 3):
        pass
    return digest_of(trainer)


def require_no_stages() -> None:
    assert not [p for p in active_children() if p.name.startswith("quorate-stage")]


@pytest.fixture
def unsplit(references: References) -> str:
    digest: str = references.once(lambda: trained(devices="cpu"), "unsplit")
    return digest


@pytest.mark.parametrize(
    ("split", "devices", "pipeline"),
    [
        (("embedding",), "cpu+cpu", "1f1b"),
        (("lstm",), "cpu+cpu", "gpipe"),
        (("norm", "embedding", "dropout"), "cpu+cpu", "interleaved"),
        (("embedding", "dropout"), "cpu+cpu+cpu", "zero-bubble"),
    ],
)
@pytest.mark.usefixtures("way")
def test_the_bits_of_a_model_in_one_piece(
    unsplit: str, split: tuple[str, ...], devices: str, pipeline: str
) -> None:
    assert trained(*split, devices=devices, pipeline=pipeline) == unsplit
    require_no_stages()


def test_a_model_that_is_cut_by_itself(unsplit: str, caplog: pytest.LogCaptureFixture) -> None:
    assert trained() == unsplit
    (line,) = [line for line in caplog.messages if "stages" in line]
    assert re.fullmatch(
        r"stages: the model is cut before \S+: \d+% \+ \d+% of a shard's time, "
        r"\S+ \w+ \+ \S+ \w+ of parameters; \S+ \w+ of activations per shard between stages",
        line,
    ), line


# --- ends of stages -------------------------------------------------------------------------------


def test_a_stage_that_is_killed_again_and_again() -> None:
    def loss(model: nn.Module, batch: list[torch.Tensor]) -> Any:
        if current_process().name == "quorate-stage-1":
            os.kill(os.getpid(), signal.SIGKILL)
        return everything.loss(model, batch)

    with pytest.raises(QuorateError, match="times") as raised:
        trained("embedding", loss=loss)
    how = "the last, of stage 1 of 2 (from embedding on), was killed by signal 9 (SIGKILL)"
    assert how in str(raised.value)


@pytest.mark.parametrize(
    ("does", "error", "text"),
    [
        (fail, Exception, "3 and 4"),  # an exception without pickling
        (MISDEEDS["memory"], RuntimeError, "allocate"),
        (lambda: sys.exit(7), ExitError, r"sys.exit\(7\) was called .* in stage 1, shard 0"),
    ],
)
def test_what_a_stage_raises_names_the_stage(
    does: Callable[[], None], error: type[Exception], text: str, way: str
) -> None:
    def loss(model: nn.Module, batch: list[torch.Tensor]) -> Any:
        returned = everything.loss(model, batch)
        if "quorate-stage-1" in (current_process().name, current_thread().name):
            does()
        return returned

    with pytest.raises(error, match=text) as raised:
        trained("embedding", loss=loss)
    notes = "\n".join(raised.value.__notes__)
    assert "stage 1 of 2 (from embedding on)" in notes
    assert "step 0, shard 0" in notes
    assert ("out of memory on cpu" in notes) == (error is RuntimeError)
    require_no_stages()


# --- impossible cases -----------------------------------------------------------------------------


def twice(model: nn.Module, batch: list[torch.Tensor]) -> Any:
    return everything.loss(model, batch)["loss"] + everything.loss(model, batch)["loss"]


def past_the_model(model: Any, batch: list[torch.Tensor]) -> Any:
    loss = everything.loss(model, batch)["loss"]
    return loss + model.norm(torch.ones(2, 4, 3, 3)).sum()  # buffers of the first stage


def by_chance(model: nn.Module, batch: list[torch.Tensor]) -> Any:
    returned = everything.loss(model, batch)
    random.random()  # without effect in this shard; perhaps not in the next
    return returned


@pytest.mark.parametrize(
    "options",
    [
        {"split": (), "devices": "cpu+cpu,cpu", "workers": 2},
        {"split": (), "devices": "cpu+" * 29 + "cpu"},
        {"devices": "cpu"},
        {"split": ("lstm", "words")},
        {"split": ("lstn",)},
        {"workers": 2},
        {"workers": quorate.Workers(1, threads=2)},
        {"precision": "fp16"},
        {"compile": True},
        {"pipeline": "2f2b"},
        {"split": ("convolution",)},
        {"split": ("unused",)},
        {"loss": by_chance},
        {"loss": twice},
        {"loss": past_the_model},
    ],
)
def test_what_cannot_be_is_refused_before_the_first_update(options: dict[str, Any]) -> None:
    split = options.pop("split", ("lstm",))
    with expect_error(UserError):
        trained(*split, **options)


def test_gradients_that_are_others_through_the_stages_are_refused() -> None:
    def loss(model: nn.Module, batch: list[torch.Tensor]) -> Any:
        returned = everything.loss(model, batch)
        # In the comparing process, never in a stage: a stage has no child.
        in_stages = any(p.name.startswith("quorate-stage") for p in active_children())
        if in_stages and returned["loss"].requires_grad:
            returned["loss"].register_hook(lambda gradient: gradient * 1.5)
        return returned

    with expect_error(SettingError, name="split"):
        trained("lstm", loss=loss)


class Late(nn.Module):
    """Computes otherwise in the process of a stage, once ``mark`` is there."""

    def __init__(self, mark: Path) -> None:
        super().__init__()
        self.mark = mark

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        is_late = current_process().name.startswith("quorate-stage") and self.mark.exists()
        return values * (1.01 if is_late else 1.0)


def doubts(mark: Path, *, is_made: bool) -> list[str]:
    found: list[str] = []

    class Marks(quorate.Callback):
        def updated(self, report: quorate.Report) -> None:
            found.extend(report.doubts)
            if is_made and report.global_step == 2:
                mark.touch()

    stages = {"devices": "cpu+cpu", "split": ["2"], "workers": 1, "spot_check_every": 1}
    model = nn.Sequential(nn.Linear(6, 4), Late(mark), nn.Linear(4, 1))
    fit(model, callbacks=[Marks()], steps=4, **stages)
    return found


def test_a_spot_check_goes_through_the_stages(tmp_path: Path) -> None:
    assert doubts(tmp_path / "none", is_made=False) == []
    (doubt,) = doubts(tmp_path / "mark", is_made=True)
    assert "a different result through the stages than in one piece" in doubt


# --- as processes of a run ------------------------------------------------------------------------


@pytest.mark.slow
def test_workers_in_stages_have_the_digest_of_one_piece_and_rows_in_the_trace(
    tmp_path: Path, references: References
) -> None:
    stages = ("--devices", "cpu+cpu", "--split", "embedding", "--workers", "2")
    files = ("--trace", str(tmp_path / "trace.json"), "--run-dir", str(tmp_path / "run"))
    ended = run(command("everything.py", options=(*stages, *files)))
    assert ended.code == 0, ended.said
    assert digests(tmp_path / "run") == references.on_a_tower("everything.py").digests
    assert inspected(tmp_path / "run")["devices"] == ["cpu+cpu"]
    # Each stage of each worker has a row in the trace, with all shards of the worker.
    written = traces.read(tmp_path / "trace.json")
    rows = {name for name in written.names.values() if "stage" in name}
    assert rows == {f"worker {n}: stage {stage}" for n in range(2) for stage in range(2)}
    spans = written.of("training", "backward")
    computed = {(span.step, span.shard) for span in spans}
    for stage in range(2):
        own = (s for s in spans if written.names[s.process, s.thread].endswith(f"stage {stage}"))
        assert {(span.step, span.shard) for span in own} == computed
