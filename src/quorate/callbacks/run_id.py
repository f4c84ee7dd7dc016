"""Ids of runs at loggers of others, kept in the run directory: a run that is resumed goes on there.

They lie beside the logs, and go aside with them: what begins anew begins another run there.
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
        run_dir: where it is kept; None: nowhere.
        logger: its name: "wandb", "mlflow".

    Raises:
        UserError: what is kept is no id.
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
        """Write it down, for a resume."""
        if self._path is not None and text != self.id:
            write_atomically(self._path, f"{text}\n")
