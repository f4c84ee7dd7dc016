"""Ids of runs at external loggers, stored in the run directory for resumed runs.

The ids lie beside the logs and are moved aside together with them: a fresh run begins a new run at
the logger.
"""

from __future__ import annotations

import re
from pathlib import Path

from quorate.errors import UserError
from quorate.machine.atomic_file import write_atomically
from quorate.machine.regular_file import read_regular

_MOST_BYTES = 256
_ID = re.compile(r"[\w.-]{1,128}")


class RunId:
    """The id of this run at a logger.

    Args:
        run_dir: the directory for the id; None: the id is not stored.
        logger: the name of the logger: "wandb", "mlflow".

    Raises:
        UserError: the stored text is no id.
    """

    def __init__(self, run_dir: Path | None, logger: str) -> None:
        self._path = None if run_dir is None else run_dir / f"{logger}.id"
        self.id: str | None = None
        if self._path is None or not self._path.exists():
            return
        try:
            text = read_regular(self._path, _MOST_BYTES).decode().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(self._path, error, fix="remove the file") from error
        if not _ID.fullmatch(text):
            raise UserError(
                self._path,
                got=f"{text!r:.80}",
                expected="an id",
                fix="remove the file",
            )
        self.id = text

    def keep(self, text: str) -> None:
        """Store the id, for a resume."""
        if self._path is not None and text != self.id:
            write_atomically(self._path, f"{text}\n")
