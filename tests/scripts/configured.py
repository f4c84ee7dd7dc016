"""A run of a configuration: see ``support/trainings``, whose runner starts it.

    quorate run --devices cpu --workers 2 --run-dir RUN tests/scripts/configured.py \
        "model=mlp optimizer=adam data=short" PART FOLDER

Arguments: the configuration; which part of the run this is, 0 or 1, where the event of the
configuration ends part 0; a folder for files of the dataset, and for a mark of what has happened.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.trainings.configuration import STEPS, parse
from support.trainings.datasets import BATCH, make_data
from support.trainings.models import MODELS
from support.trainings.optimizers import make_optimize

import quorate

CONFIGURATION, PART, FOLDER = parse(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])


class Kills(quorate.Callback):
    """Kills a process once, after update ``at``: the main process, or one of a worker."""

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
trainer = quorate.Trainer(
    model.make,
    model.loss(),
    optimizer=make_optimize(CONFIGURATION.optimizer, CONFIGURATION.options, model.phases),
    batch_size=BATCH,
    shards=CONFIGURATION.shards,
    seed=CONFIGURATION.seed,
    loading=quorate.Loading(**data.loading),
)
ends_early = CONFIGURATION.event == "resume" and PART == 0
trainer.fit(
    data.dataset,
    steps=CONFIGURATION.at if ends_early else STEPS,
    validation=data.validation if "validation" in CONFIGURATION.options else None,
    callbacks=[Kills()] if CONFIGURATION.event in ("kill-worker", "kill-run") else [],
)
