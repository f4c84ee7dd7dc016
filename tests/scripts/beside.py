"""State outside of the model, and values by step: annealing, a curriculum, a teacher.

``beside.py [KILL]``: the whole run kills itself with signal 9 after update KILL; or after update
-KILL the run kills worker 0, and trains until the worker is back. Every fourth update is saved.
"""

import os
import signal
import sys
import time
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import quorate
from quorate.data import at as place_of_rows

KILL = int(sys.argv[1]) if len(sys.argv) > 1 else 0
ROWS, FEATURES = 60, 6  # five updates an epoch
X, NOISE = torch.randn(2, ROWS, FEATURES, generator=torch.Generator().manual_seed(0))


class Last(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + 0.1 * shared.beta)


def net() -> nn.Module:
    torch.manual_seed(1)
    first = nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2)
    return nn.Sequential(*first, Last(8, 2))


class Curriculum(Dataset[Any]):
    """Rows harder in each epoch."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> Any:
        at = place_of_rows()
        hard = at.epoch * 0.3 + at.progress if at.training else 0.5
        return X[row] + hard * NOISE[row] + 0.1 * torch.randn(FEATURES), row % 2


shared = quorate.Shared("shared", beta=0.0, teacher=net().eval(), ring=torch.zeros(1, 2))


def loss(model: nn.Module, batch: Any, at: Any) -> Any:
    x, y = batch
    if KILL < 0 and at.training:
        time.sleep(0.1)  # worker 0 has the time to come back
    out = model(x * (1 + float(at.rows.sum()) / 1000))
    wanted = shared.teacher(x) + shared.ring.mean(0)
    annealed = (at.progress + 0.01 * at.epoch + shared.beta) * out.square().mean()
    value = F.cross_entropy(out, y) + annealed + 0.5 * (out - wanted).square().mean()
    return {"loss": value, "beta": shared.beta}


class After(quorate.Callback):
    """The actions of user code between two updates, and at the end."""

    is_back = False

    def updated(self, report: quorate.Report) -> None:
        n = report.global_step
        shared.beta = min(1.0, n / 10)
        with torch.no_grad():
            pairs = zip(shared.teacher.parameters(), trainer.model.parameters(), strict=True)
            for mine, theirs in pairs:
                mine.data.mul_(0.9).add_(theirs.data, alpha=0.1)
        shared.ring = torch.cat([shared.ring, trainer.model[4].bias.detach()[None]])[-4:]
        if n == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        if n == -KILL:
            os.kill(trainer.workers[0].pid or 0, signal.SIGKILL)
        self.is_back = self.is_back or (n > 2 - KILL and 0 in report.worker_losses)


trainer = quorate.Trainer(
    net,
    loss,
    optimizer=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    batch_size=12,
    shards=4,
    seed=3,
    compute=quorate.Compute(strict=True),
    run_dir=quorate.RunDir(None, save_every_steps=4),
)
after, rows = After(), Curriculum()
trainer.fit(rows, epochs=5, callbacks=[after], validation=rows)
print("worker 0 was there in the end" if after.is_back else "worker 0 is gone")
