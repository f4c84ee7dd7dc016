"""A script that is not the same when a worker runs it again; the argument says how.

python tests/scripts/unrepeatable.py data FOLDER
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

import quorate

how, folder = sys.argv[1], Path(sys.argv[2])
counter = folder / "counter"
runs = int(counter.read_text()) if counter.exists() else 0
counter.write_text(str(runs + 1))
again = runs > 0
if how == "fails" and again:
    print("about to fail")
    raise RuntimeError("only in workers")

x = np.random.default_rng(None if how == "data" else 0).standard_normal((64, 6))
data = TensorDataset(torch.tensor(x, dtype=torch.float32))
width = 9 if how == "model" and again else 8
trainer = quorate.Trainer(
    lambda: nn.Sequential(nn.Linear(6, width), nn.Linear(width, 1)),
    lambda model, batch: model(batch[0]).square().mean(),
    optimizer=lambda params: torch.optim.SGD(params, lr=1e-2),
    batch_size=16,
    shards=4,
    devices="cpu",
    workers=2,
)
if how != "edited":
    trainer.fit(data, epochs=3)
else:
    # Until it is known that the worker is gone: on a busy machine that takes seconds.
    for update in trainer.updates(data, epochs=150):
        time.sleep(0.1)
        if update.global_step > 6 and trainer.workers[1].is_gone:
            trainer.stop()
        if update.global_step == 2:
            here = Path(__file__)
            here.write_text(here.read_text() + "\n# edited")
            os.kill(trainer.workers[1].pid, signal.SIGKILL)
