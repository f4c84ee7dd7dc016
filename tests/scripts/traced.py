"""A training with an evaluation after each epoch, of which a trace is taken.

    quorate run --devices cpu --workers 2 --trace FILE tests/scripts/traced.py RUN_DIR [raises]

With ``raises`` the callback of update 7 does.
"""

from __future__ import annotations

import sys
from pathlib import Path

import quorate
from quorate.services.report import Report

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.small import DATA, trainer


class Raises(quorate.Callback):
    def updated(self, report: Report) -> None:
        if report.global_step == 7:
            raise RuntimeError("as it was asked for")


if __name__ == "__main__":
    trainer(Path(sys.argv[1])).fit(
        DATA, epochs=2, validation=DATA, callbacks=[Raises()] if sys.argv[2:] else []
    )
