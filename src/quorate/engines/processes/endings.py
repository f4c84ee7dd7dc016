"""How a worker's process ended, in words. Pure."""

from __future__ import annotations

import signal
from typing import NamedTuple


class Ending(NamedTuple):
    """What the system knows of the end of a process."""

    code: int  # its exit code; -n after signal n
    error: str | None = None  # why there was no process, if it could not be forked
    output: str = ""  # the end of what the script printed up to its training loop
    is_out_of_memory: bool = False  # whether the kernel killed a process when memory had run out
    node: str = ""  # the machine that it was on, if that may be another
    helps: str = "fewer workers, more shards"  # where memory ran out
    lost: str = ""  # what was lost with which nobody knows how it ended

    @property
    def is_kill(self) -> bool:
        """Whether it was killed by an operator, or by the kernel when memory ran out, or is lost.

        Any other signal is the process's own doing: SIGSEGV, SIGABRT.
        """
        if self.lost:
            return True
        return self.error is None and self.code == -signal.SIGKILL

    def text(self, *, had_joined: bool) -> str:
        """Return a predicate: "was killed by signal 9 (SIGKILL)".

        Args:
            had_joined: whether it took part in a job. Before that, what it printed is hidden from
                the user, and says why it ended.
        """
        where = f" on {self.node}" if self.node else ""
        if self.lost:
            return f"is lost with {self.lost}{where}"
        if self.error is not None:
            return f"cannot be started{where}: {self.error}"
        if self.is_kill and self.is_out_of_memory:
            return (
                f"was killed by the kernel{where} (signal 9, SIGKILL), because memory ran out "
                f"(use {self.helps}, or a higher limit for the container)"
            )
        if self.code < 0:
            return f"was killed by signal {-self.code}{_name(-self.code)}{where}"
        ended = f"ended with exit code {self.code}{where}"
        return ended if had_joined else f"{ended} while starting: {self.output}"


def _name(number: int) -> str:
    try:
        return f" ({signal.Signals(number).name})"
    except ValueError:
        return ""
