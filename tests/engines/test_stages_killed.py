"""Processes of stages killed by signal 9, in every phase: the bits of a run in one piece.

A run is killed at step after step, at the places in ``PHASES``; each kill leaves a file.
"""

import os
import signal
import sys
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from multiprocessing import active_children, current_process
from pathlib import Path
from struct import pack_into, unpack_from
from typing import Any

import torch
from scripts import everything
from support.digests import digest_of
from torch import nn
from torch.utils.data import Subset

import quorate

# Steps: the kill happens in the step, or after the step.
PHASES = {
    "first shard": 0,
    "comparison": 0,
    "between shards": 2,
    "forward": 3,
    "loss": 4,
    "evaluation": 6,  # of the next update
    "backward": 7,
    "backward of the first": 8,
    "sending": 9,
    "between steps": 10,
    "checkpoint": 12,
}


class Kills(quorate.Callback):
    """Kills processes of stages, each phase once; none, if there are none.

    Args:
        marks: a folder, with a file for each kill.
    """

    def __init__(self, marks: Path) -> None:
        self._marks = marks
        # The present step of this process, and the number of begun shards: separate in a fork.
        self._now = mmap(-1, 16, flags=MAP_PRIVATE | MAP_ANONYMOUS)

    def __deepcopy__(self, _: Any) -> "Kills":
        return self  # for a model with these hooks

    def watch(self, model: nn.Module) -> None:
        """Be told when modules of both stages are called."""
        model.get_submodule("convolution").register_forward_hook(self._called_first)
        model.get_submodule("words").register_forward_hook(self._called_second)

    def loss(self, model: nn.Module, batch: Any, at: Any) -> dict[str, Any]:
        """Return the loss; some calls kill processes."""
        shards = self._begin(at.step) + 1
        if current_process().name == "quorate-stage-0":
            self._own("first shard")
        elif current_process().name == "quorate-stage-1" and shards > 1:
            self._own("between shards")
        elif current_process().name == "MainProcess":
            self._others("comparison" if at.training else "evaluation")
        found: dict[str, Any] = everything.loss(model, batch)
        if current_process().name == "quorate-stage-1":
            self._own("loss")
        return found

    def updated(self, report: quorate.Report) -> None:
        self._begin(report.global_step - 1)
        self._others("between steps")

    def saved(self, global_step: int, path: Path) -> None:
        self._begin(global_step - 1)
        self._others("checkpoint")

    def _begin(self, step: int) -> int:
        _, shards = unpack_from("<qq", self._now)
        pack_into("<qq", self._now, 0, step, shards + 1)
        return int(shards)

    def _called_first(self, _: nn.Module, args: Any, output: Any) -> None:
        if current_process().name == "quorate-stage-0":
            output.register_hook(lambda _: self._own("backward of the first"))
            if self._is_time("sending"):
                sys.setprofile(self._profiled)

    def _called_second(self, _: nn.Module, args: Any, output: Any) -> None:
        if current_process().name == "quorate-stage-1":
            self._own("forward")
            output.register_hook(lambda _: self._own("backward"))

    def _profiled(self, _: Any, event: str, called: Any) -> None:
        if event == "c_call" and called.__name__ in ("send", "sendall", "sendmsg"):
            self._own("sending")

    def _own(self, phase: str) -> None:
        """End this process at the right time."""
        if self._is_time(phase) and self._marked(phase):
            os.kill(os.getpid(), signal.SIGKILL)

    def _others(self, phase: str) -> None:
        """End both stages of this process at the right time."""
        stages = [p for p in active_children() if p.name.startswith("quorate-stage")]
        if stages and self._is_time(phase) and self._marked(phase):
            for process in stages:
                process.kill()

    def _is_time(self, phase: str) -> bool:
        return unpack_from("<q", self._now)[0] == PHASES[phase]

    def _marked(self, phase: str) -> bool:
        try:
            (self._marks / phase).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def trained(folder: Path, *split: str, pipeline: str = "1f1b") -> str:
    (marks := folder / "marks").mkdir(parents=True)
    torch.manual_seed(3)
    model, kills = everything.Everything(), Kills(marks)
    kills.watch(model)
    trainer = quorate.Trainer(
        model,
        kills.loss,
        optimizer=quorate.Optimize(lambda params: torch.optim.Adam(params), ema_decay=0.9),
        batch_size=16,
        shards=4,
        devices="+".join(["cpu"] * (len(split) + 1)),
        workers=quorate.Workers(1, engine="towers"),
        compute=quorate.Compute(split=list(split) or None, pipeline=pipeline),
        run_dir=quorate.RunDir(folder / "run", save_every_steps=13),
    )
    rows = everything.Sentences(96)
    trainer.fit(rows, steps=14, validation=Subset(rows, range(16)), callbacks=[kills])
    return digest_of(trainer)


def test_stages_that_are_killed_in_every_phase(tmp_path: Path) -> None:
    in_stages = trained(tmp_path / "stages", "embedding", pipeline="zero-bubble")
    assert in_stages == trained(tmp_path / "whole")
    assert {path.name for path in (tmp_path / "stages" / "marks").iterdir()} == {*PHASES}
    assert not [*(tmp_path / "whole" / "marks").iterdir()]
    assert not [p for p in active_children() if p.name.startswith("quorate-stage")]
