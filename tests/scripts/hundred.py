"""So many updates with everything that a resume could get wrong, shuffled, in epochs of 14 updates.

quorate run --devices cpu --workers 2 --run-dir RUN tests/scripts/hundred.py STEPS [OPTIMIZER]
"""

from __future__ import annotations

import sys

import torch
from everything import Everything, Sentences, loss

import quorate

OPTIMIZERS = {
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda params: torch.optim.Adam(params, lr=3e-3),
}

if __name__ == "__main__":
    name = sys.argv[2] if len(sys.argv) > 2 else "adam"
    trainer = quorate.Trainer(
        Everything,
        loss,
        optimizer=quorate.Optimize(
            OPTIMIZERS[name],
            clip_norm=1.0,
            ema_decay=0.99,
            schedule=lambda opt: torch.optim.lr_scheduler.OneCycleLR(
                opt, 0.05, total_steps=120, cycle_momentum=name == "momentum"
            ),
        ),
        batch_size=8,
        shards=4,
    )
    trainer.fit(Sentences(110), steps=int(sys.argv[1]), validation=Sentences(37))
