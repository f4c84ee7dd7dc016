"""A script whose stages can be ended: everything.py's model, and a loss that kills its process.

    quorate run --devices cpu+cpu --split embedding tests/scripts/in_stages.py PHASE MARKS

``PHASE``: before, forward, loss, backward: where a process of a stage kills itself, once for each
file that it can make in the folder ``MARKS``; or raise, in the last stage. Or hang, stop: where it
waits for ever, or stops itself, once.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import torch
from everything import Everything, Sentences, loss
from torch import nn

import quorate

PHASE, MARKS = sys.argv[1], Path(sys.argv[2])
KILLS = 2  # in each run of the script


def end(phase: str) -> None:
    """End this process, if it is one of a stage, and its time has come."""
    if phase != PHASE or not multiprocessing.current_process().name.startswith("quorate-stage-1"):
        return
    for kill in range(1 if phase in ("hang", "stop") else KILLS):
        try:
            (MARKS / f"{phase}-{kill}").touch(exist_ok=False)
        except FileExistsError:
            continue
        if phase == "hang":
            time.sleep(3600)
        os.kill(os.getpid(), signal.SIGSTOP if phase == "stop" else signal.SIGKILL)


class Ending(nn.Module):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        end("forward")
        if values.requires_grad:
            values.register_hook(lambda _: end("backward"))
        return values * 1


class Model(Everything):
    def __init__(self) -> None:
        super().__init__()
        self.ending = Ending()

    def forward(self, image: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits, words = super().forward(image, tokens)
        return logits, self.ending(words)


def ending_loss(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    end("before")
    returned = loss(model, batch)
    end("loss")
    end("hang")
    end("stop")
    if PHASE == "raise" and multiprocessing.current_process().name.startswith("quorate-stage"):
        raise ZeroDivisionError("in the last stage")
    return returned


if __name__ == "__main__":
    torch.manual_seed(3)
    trainer = quorate.Trainer(
        Model(),
        ending_loss,
        optimizer=lambda params: torch.optim.Adam(params, lr=3e-3),
        batch_size=24,
        shards=4,
    )
    trainer.fit(Sentences(110), epochs=1)
