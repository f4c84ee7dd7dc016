"""Processes of stages that are killed by signal 9, in every phase: the bits of a run in one piece.

A run is killed at step after step, where ``PHASES`` says; each kill leaves a file.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from multiprocessing import active_children, current_process
from pathlib import Path
from struct import pack_into, unpack_from
from typing import Any, NamedTuple

import pytest
import torch
from support.chatbot import data, known, random_rows, seq2seq
from support.chatbot import example as chatbot
from support.digests import digest_of
from support.everything import EVERYTHING
from support.example_modules import EXAMPLES, example_modules
from torch import nn
from torch.utils.data import Subset, TensorDataset

import quorate

pytestmark = pytest.mark.slow

with example_modules(EXAMPLES / "segmentation") as segmentation:
    pass

# Of steps: what is killed in them, or after them.
PHASES = {
    "first shard": 0,
    "comparison": 0,
    "between shards": 2,
    "forward": 3,
    "loss": 4,
    "evaluation": 6,  # of the update that would come next
    "backward": 7,
    "backward of the first": 8,
    "sending": 9,
    "between steps": 10,
    "two at once": 11,
    "checkpoint": 12,
}
ROWS = 96


class Example(NamedTuple):
    """A model, and where it is cut."""

    model: Callable[[], nn.Module]
    split: str
    first: str  # a module of the first stage
    second: str
    loss: Callable[..., Any]
    rows: Callable[[], Sequence[Any]]
    collate: Callable[..., Any] | None = None


def tiles() -> Any:
    generator = torch.Generator().manual_seed(2)
    images = torch.randint(0, 256, (ROWS, 1, 32, 32), generator=generator, dtype=torch.uint8)
    return TensorDataset(images, images[:, 0] // 64, torch.zeros(ROWS, dtype=torch.int64))


CASES = {
    "everything": Example(
        EVERYTHING.Everything,
        "embedding",
        "convolution",
        "words",
        EVERYTHING.loss,
        lambda: EVERYTHING.Sentences(ROWS),
    ),
    "chatbot": Example(
        lambda: seq2seq(size=20, units=8),
        "decoder",
        "encoder",
        "combined",
        chatbot.loss.Loss(known(20), "en"),
        lambda: random_rows(ROWS, 20),
        data.collate,
    ),
    "u-net": Example(
        lambda: segmentation.model.UNet(1, widths=(4, 6, 8)),
        "up.0",
        "stem",
        "head",
        segmentation.loss.loss_with([1.0, 2.0, 3.0, 4.0]),
        tiles,
    ),
}


class Kills(quorate.Callback):
    """Kills processes of stages, each phase once; none, if there are none.

    Args:
        marks: a folder, with a file for each kill.
    """

    def __init__(self, marks: Path) -> None:
        self._marks = marks
        # The step that this process is at, and the shards that it has begun: a fork's are its own.
        self._now = mmap(-1, 16, flags=MAP_PRIVATE | MAP_ANONYMOUS)

    def __deepcopy__(self, _: Any) -> Kills:
        return self  # of a model that has its hooks

    def watch(self, model: nn.Module, first: str, second: str) -> None:
        """Be told when modules are called."""
        model.get_submodule(first).register_forward_hook(self._called_first)
        model.get_submodule(second).register_forward_hook(self._called_second)

    def loss(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A loss function in which there are kills."""

        def loss(model: nn.Module, batch: Any, at: Any) -> dict[str, Any]:
            shards = self._begin(at.step) + 1
            if current_process().name == "quorate-stage-0":
                self._own("first shard")
            elif current_process().name == "quorate-stage-1" and shards > 1:
                self._own("between shards")
            elif current_process().name == "MainProcess":
                self._others("comparison" if at.training else "evaluation")
            found = function(model, batch)
            if current_process().name == "quorate-stage-1":
                self._own("loss")
            return {name: found[name] for name in ("loss", "weight")}

        return loss

    def updated(self, report: quorate.Report) -> None:
        self._begin(report.global_step - 1)
        self._others("between steps")
        self._others("two at once", count=2)

    def saved(self, global_step: int, path: Path) -> None:
        self._begin(global_step - 1)
        self._others("checkpoint")

    def _begin(self, step: int) -> int:
        _, shards = unpack_from("<qq", self._now)
        pack_into("<qq", self._now, 0, step, shards + 1)
        return int(shards)

    def _called_first(self, _: nn.Module, args: Any, output: Any) -> None:
        if current_process().name == "quorate-stage-0":
            self._hooked(output, "backward of the first")
            if self._is_time("sending"):
                sys.setprofile(self._profiled)

    def _called_second(self, _: nn.Module, args: Any, output: Any) -> None:
        if current_process().name == "quorate-stage-1":
            self._own("forward")
            self._hooked(output, "backward")

    def _hooked(self, output: Any, phase: str) -> None:
        while not isinstance(output, torch.Tensor):
            output = output[0]
        output.register_hook(lambda _: self._own(phase))

    def _profiled(self, frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_name == "_pickled":
            self._own("sending")

    def _own(self, phase: str) -> None:
        """End this process, if it is time."""
        if self._is_time(phase) and self._marked(phase):
            os.kill(os.getpid(), signal.SIGKILL)

    def _others(self, phase: str, count: int = 1) -> None:
        """End processes of this one, if it is time."""
        stages = [p for p in active_children() if p.name.startswith("quorate-stage")]
        if stages and self._is_time(phase) and self._marked(phase):
            for process in stages[-count:]:
                process.kill()

    def _is_time(self, phase: str) -> bool:
        return unpack_from("<q", self._now)[0] == PHASES[phase]

    def _marked(self, phase: str) -> bool:
        try:
            (self._marks / phase).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def trained(case: Example, folder: Path, *split: str, pipeline: str = "1f1b") -> str:
    marks = folder / "marks"
    marks.mkdir(parents=True)
    torch.manual_seed(3)
    model, kills = case.model(), Kills(marks)
    kills.watch(model, case.first, case.second)
    trainer = quorate.Trainer(
        model,
        kills.loss(case.loss),
        optimizer=quorate.Optimize(lambda params: torch.optim.Adam(params), ema_decay=0.9),
        batch_size=16,
        shards=4,
        devices="+".join(["cpu"] * (len(split) + 1)),
        workers=quorate.Workers(1, engine="towers"),
        compute=quorate.Compute(split=list(split) or None, pipeline=pipeline),
        loading=quorate.Loading(collate=case.collate) if case.collate else None,
        run_dir=quorate.RunDir(folder / "run", save_every_steps=13),
    )
    rows = case.rows()
    trainer.fit(rows, steps=14, validation=Subset(rows, range(16)), callbacks=[kills])
    return digest_of(trainer)


@pytest.mark.parametrize(
    ("name", "pipeline"),
    [*((name, "1f1b") for name in CASES), ("chatbot", "zero-bubble"), ("u-net", "zero-bubble")],
)
def test_stages_that_are_killed_in_every_phase(
    name: str, pipeline: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "data", data)  # of which batches of the chatbot are
    case = CASES[name]
    in_stages = trained(case, tmp_path / "stages", case.split, pipeline=pipeline)
    assert in_stages == trained(case, tmp_path / "whole")
    assert {path.name for path in (tmp_path / "stages" / "marks").iterdir()} == {*PHASES}
    assert not [*(tmp_path / "whole" / "marks").iterdir()]
    assert not [p for p in active_children() if p.name.startswith("quorate-stage")]


@pytest.mark.usefixtures("in_threads")
@pytest.mark.parametrize("name", [*CASES])
def test_stages_that_are_threads(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "data", data)
    case = CASES[name]
    assert trained(case, tmp_path / "stages", case.split) == trained(case, tmp_path / "whole")
