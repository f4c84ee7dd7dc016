"""A training that lasts as long as is wanted: for looking at its run directory meanwhile.

    quorate run --run-dir DIR --engine towers tests/scripts/lasting.py STEPS SECONDS [FOLDER]

Arguments: updates, seconds that each takes at least, and a folder in which each process that begins
to train leaves a file with its pid. Prints the step that it came to.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

import quorate

STEPS, SECONDS = int(sys.argv[1]), float(sys.argv[2])


def loss(model: torch.nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Return the mean squared error, after a while."""
    time.sleep(SECONDS)
    return (model(batch[0]) - batch[1]).square().mean()


class Begun(quorate.Callback):
    """Says that updates are made."""

    def updated(self, report: object) -> None:
        """Leave a file with the pid."""
        if len(sys.argv) > 3:
            (Path(sys.argv[3]) / str(os.getpid())).touch()


if __name__ == "__main__":
    torch.manual_seed(0)
    x = torch.randn(48, 6)
    trainer = quorate.Trainer(
        torch.nn.Linear(6, 1),
        loss,
        optimizer=lambda params: torch.optim.Adam(params, lr=0.01),
        batch_size=12,
        shards=1,
    )
    trainer.fit(TensorDataset(x, x.sum(1, keepdim=True)), steps=STEPS, callbacks=[Begun()])
    print(f"came to step {trainer.global_step}")
