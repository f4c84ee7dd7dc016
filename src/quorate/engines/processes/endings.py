"""Endings: how a worker's process ended, and the messages printed when a worker ends.

A message names the worker, the way the process ended, and the consequence for the run:
"worker 1 (cpu) was killed by signal 9 (SIGKILL) in step 3, shard 5, forward; another is starting".
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from typing import NamedTuple

from quorate.engines.worker_status import Doing
from quorate.machine.resources import oom_kills

ANOTHER_STARTS = "another is starting"
CONTINUES_WITHOUT = "the run continues without this worker"
PROBABLY_MEMORY = "if nobody killed the worker, memory ran out"
SOCKET_CLOSED = "closed its wire"  # and the process went on


class Ending(NamedTuple):
    """The end of a process, as far as the system reports it.

    Attributes:
        code: the exit code; -n after signal n.
        error: why there was no process, if the process could not be forked.
        output: the end of the script's output before its training loop.
        is_out_of_memory: whether the kernel killed a process because memory had run out.
        node: the machine of the process, if workers are on several machines.
        helps: advice against running out of memory.
        lost: what was lost together with the process, if nobody knows how the process ended.
    """

    code: int
    error: str | None = None
    output: str = ""
    is_out_of_memory: bool = False
    node: str = ""
    helps: str = "fewer workers, more shards"
    lost: str = ""

    @property
    def is_kill(self) -> bool:
        """True if an operator or the kernel killed the process, or the process is lost.

        Any signal but 9 is the process's own doing: SIGSEGV, SIGABRT.
        """
        return bool(self.lost) or (self.error is None and self.code == -signal.SIGKILL)

    def explained(self, oom_kills_before: int) -> Ending:
        """Return the ending, with memory as the cause of a kill if the kernel has killed since.

        Args:
            oom_kills_before: the kernel's kills for lack of memory that have another explanation.
        """
        if self.is_kill and oom_kills() > oom_kills_before:
            return self._replace(is_out_of_memory=True)
        return self

    def text(self, *, had_joined: bool) -> str:
        """Return a predicate: "was killed by signal 9 (SIGKILL)".

        Args:
            had_joined: whether the worker took part in a job. Before the first job the output of
                the process is hidden from the user, and says why the process ended.
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


def at_work(how: str, doing: Doing, where: str, overdue_s: float | None) -> str:
    """Return how a worker ended that took part in a job, with its last shard and phase.

    Args:
        how: a predicate.
        doing: the last phase that the worker reported.
        where: the last shard: "step 3, shard 5".
        overdue_s: the length of the phase in seconds, if the coordinator killed the worker.
    """
    if doing.phase in ("starting", "waiting"):
        return how
    stage = f" in stage {doing.stage}" if doing.stage >= 0 else ""
    overdue = "" if overdue_s is None else f" for {overdue_s:.0f} s"
    return f"{how} in {where}, {doing.phase}{stage}{overdue}"


def overdue(timeout_s: float, *, is_placed: bool, is_at_loop: bool) -> str:
    """Return why the coordinator kills a worker that has not answered in time."""
    what = "answer" if is_at_loop else "start"
    if not is_placed:
        what = "find a machine that has room for it"
    return f"took more than worker_timeout_s={timeout_s:g} s to {what}"


def script_edited(file: str) -> str:
    """Return why no worker can start any more."""
    return f"{file} was edited during the run, so no other worker can start"


def too_few(present: int, enough: int, pending: int, room: str) -> str:
    """Return why a run waits for workers."""
    here = f"{present} of at least {enough} here"
    return f"waiting for workers: {here}; {pending} start as soon as {room}"


def nobody_left(reasons: Iterable[str]) -> str:
    """Return how a run ends without workers."""
    lines = "\n".join(f"  {reason}" for reason in reasons)
    return f"no worker is left, and no other is started:\n{lines}"


def _name(number: int) -> str:
    try:
        return f" ({signal.Signals(number).name})"
    except ValueError:
        return ""
