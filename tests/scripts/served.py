"""A model of a few blocks of parameters, so that several servers have a slice of it.

    quorate run --engine ray --workers 2 --servers 2 --run-dir RUN tests/scripts/served.py plain 12

Arguments: what happens beside (nothing; "touched": a callback reads and changes parameters, momenta
and learning rates; "killed": a server is killed after a third of the updates); updates.
"""

from __future__ import annotations

import os
import signal
import sys

import psutil
import torch
from torch import nn
from torch.utils.data import TensorDataset

import quorate

how, updates = sys.argv[1], int(sys.argv[2])


class Touch(quorate.Callback):
    """User code between two updates, as a loop of plain torch may have it."""

    def started(self, run: quorate.Run) -> None:
        self.model, self.trainer = run.model, run

    def updated(self, report: quorate.Report) -> None:
        n, inner = report.global_step, trainer._prepared.state.optimizer.inner
        if n == 2:
            with torch.no_grad():
                self.model[0].weight.clamp_(-0.1, 0.1)
        if n == 4:
            for parameter in self.model.parameters():
                inner.state[parameter]["exp_avg"].mul_(0.5)
        if n == 5:
            inner.param_groups[0]["lr"] *= 0.5
        if n == 6:
            print("norm", float(self.model[2].weight.detach().norm()), flush=True)


class Kill(quorate.Callback):
    """The end of a server, as a machine's end makes it."""

    def updated(self, report: quorate.Report) -> None:
        if report.global_step == updates // 3:
            own = psutil.Process().children(recursive=True)
            servers = [process for process in own if "ray::Server" in " ".join(process.cmdline())]
            os.kill(servers[0].pid, signal.SIGKILL)


def loss(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    rows, labels = batch
    return {"loss": nn.functional.cross_entropy(model(rows), labels)}


torch.manual_seed(0)
generator = torch.Generator().manual_seed(0)
data = TensorDataset(
    torch.randn(96, 80, generator=generator), torch.randint(0, 9, (96,), generator=generator)
)
trainer = quorate.Trainer(
    nn.Sequential(
        nn.Linear(80, 1000), nn.ReLU(), nn.Linear(1000, 300), nn.BatchNorm1d(300), nn.Linear(300, 9)
    ),
    loss,
    optimizer=quorate.Optimize(
        lambda params: torch.optim.AdamW(params, lr=1e-3), clip_norm=0.5, ema_decay=0.9
    ),
    batch_size=24,
    shards=4,
)
callbacks = {"touched": [Touch()], "killed": [Kill()]}.get(how, [])
trainer.fit(data, steps=updates, callbacks=callbacks, validation=data)
