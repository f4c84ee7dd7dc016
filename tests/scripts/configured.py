"""A run of a configuration: see ``support/trainings``, whose runner starts the run.

    quorate run --devices cpu --workers 2 --run-dir RUN tests/scripts/configured.py \
        "model=mlp optimizer=adam data=short" PART FOLDER

Arguments: the configuration; the part of the run, 0 or 1: the event of the configuration ends part
0; a folder for files of the dataset, and for marks of past events.
"""

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.trainings.configuration import parse
from support.trainings.datasets import BATCH, make_data
from support.trainings.faults import SlowRows, Strikes, disturbed, faults_of, in_script
from support.trainings.models import MODELS
from support.trainings.optimizers import make_optimize
from torch.utils.data import TensorDataset

import quorate

CONFIGURATION, PART, FOLDER = parse(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])


class Kills(quorate.Callback):
    """Kills a process once, after update ``at``: the main process, or a worker's process."""

    def updated(self, report: quorate.Report) -> None:
        mark = FOLDER / "killed"
        if report.global_step < CONFIGURATION.at or mark.exists():
            return
        if CONFIGURATION.event == "kill-run":
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        for worker in reversed(trainer.workers):
            if worker.pid is not None and worker.pid != os.getpid():
                mark.touch()
                os.kill(worker.pid, signal.SIGKILL)
                break


model = MODELS[CONFIGURATION.model]
data = make_data(CONFIGURATION.data, model.inputs, FOLDER)
faults = faults_of(CONFIGURATION.fault)[PART] if CONFIGURATION.fault else []
differs = in_script(faults, FOLDER)
loss, rows = model.loss, data.dataset
if "data" in differs:
    rows = TensorDataset(*(each.flip(0) for each in rows.tensors))
if faults or CONFIGURATION.pause or CONFIGURATION.rule != "sync":
    loss = disturbed(
        loss,
        faults,
        FOLDER,
        pause_s=CONFIGURATION.pause / 1e3,
        counted_rows=len(rows) if CONFIGURATION.rule != "sync" else 0,
    )
if CONFIGURATION.pause:
    rows = SlowRows(rows, CONFIGURATION.pause / 1e3)
trainer = quorate.Trainer(
    MODELS["frozen"].make if "model" in differs else model.make,
    loss,
    optimizer=make_optimize(CONFIGURATION.optimizer, CONFIGURATION.options, model.phases),
    batch_size=BATCH,
    shards=CONFIGURATION.shards,
    seed=CONFIGURATION.seed,
    loading=quorate.Loading(**data.loading),
)
callbacks: list[quorate.Callback] = []
if CONFIGURATION.event in ("kill-worker", "kill-run"):
    callbacks.append(Kills())
if faults:
    callbacks.append(Strikes(trainer, faults, FOLDER))
ends_early = CONFIGURATION.event == "resume" and PART == 0
trainer.fit(
    rows,
    steps=CONFIGURATION.at if ends_early else CONFIGURATION.steps,
    validation=data.validation if "validation" in CONFIGURATION.options else None,
    callbacks=callbacks,
)
print("to the end", time.time())
