"""No input: a worker has none, and says so to whoever reads it, where the script's process has."""

from __future__ import annotations

import io
import sys
from typing import Any, NoReturn

from quorate.engines.as_worker.users_line import line_of_caller
from quorate.errors import InputError


class NoInput(io.TextIOBase):
    """Standard input of a worker. It is open, no terminal, and whatever reads it raises.

    Empty it would be believed: a script that takes its data from there would make other data in
    workers, and ``input()`` would raise an error in them that nobody can explain.
    """

    encoding = "utf-8"

    def read(self, _size: int | None = -1) -> NoReturn:
        """Raise."""
        self._refuse()

    def readline(self, _size: int = -1) -> NoReturn:  # type: ignore[override]
        """Raise. Iteration, ``readlines`` and ``input()`` call it."""
        self._refuse()

    @property
    def buffer(self) -> Any:
        """Raise: nobody asks for it but to read."""
        self._refuse()

    def readable(self) -> bool:
        """Return True."""
        return True

    def fileno(self) -> int:
        """Return the descriptor, which is of /dev/null."""
        return 0

    def _refuse(self) -> NoReturn:
        line = line_of_caller(sys._getframe(1))
        raise InputError(
            "stdin",
            f"{line} reads it in a worker process, which has none",
            fix="read it only where quorate.is_worker() is False, or take what the script "
            "needs from its arguments",
        )


def take_away_input() -> None:
    """Have whatever reads standard input raise from now on."""
    sys.stdin = NoInput()
