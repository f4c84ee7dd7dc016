"""The heartbeat of a rank: a sign of life about once a second, with the rank's activity."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from quorate.engines.worker_status import PHASES, Doing, WorkerStatus

MOST_BYTES = 8184  # of a packed heartbeat, whose texts are ``shortened``
_MOST_CHARACTERS = 400


class EndReason(NamedTuple):
    """Why all ranks are to end."""

    text: str
    rank: int | None  # the lost rank; None if no single rank is lost
    has_ended: bool = False  # True: the process that started the rank knows more


class Heartbeat(msgspec.Struct, frozen=True):
    """The state of a rank. New fields get defaults: versions of quorate may differ."""

    rank: int
    host: str  # the name of the host
    mark: str  # of the host, see ``this_host.mark``
    pid: int
    device: str
    doing: Doing
    is_late: bool  # see ``Doing``
    sent_at: float  # by the clock of the rank, as ``doing.since``
    number: int = 0  # rises with each heartbeat
    stop_signal: str | None = None  # the signal that requested the end of this rank
    leaves: str | None = None  # why this rank is about to leave
    end: EndReason | None = None  # of rank 0
    all_here: bool = False  # of rank 0: whether heartbeats of all ranks have come

    def status(self, heard_at: float, *, own_mark: str, show_host: bool) -> WorkerStatus:
        """Return the status of a worker.

        Args:
            heard_at: ``time.monotonic()`` when the heartbeat came.
            own_mark: mark of this host, where process ids of other hosts mean nothing.
            show_host: whether the run has several hosts.
        """
        is_here = self.mark == own_mark
        doing = self.doing._replace(since=heard_at - self.phase_s)
        pid, host = self.pid if is_here else None, self.host if show_host else None
        return WorkerStatus(self.rank, self.device, pid, None, *doing, host, not is_here)

    @property
    def phase_s(self) -> float:
        """Seconds spent in the current phase of the current shard."""
        return self.sent_at - self.doing.since

    @property
    def place(self) -> str:
        """Rank and host, in words: ``rank 2 on node7``."""
        return f"rank {self.rank} on {self.host}"

    @property
    def activity(self) -> str:
        """Phase, step and shard, in words: ``forward of step 7, shard 3``."""
        doing = self.doing
        if doing.phase == "starting":
            return "the start of its script"
        step = f" of step {doing.step:,}" if doing.shards else ""
        shard = f", shard {doing.shard}" if doing.phase in PHASES[2:] else ""
        return f"{doing.phase}{step}{shard}"


def shortened(text: str) -> str:
    """Return the beginning of a text, short enough for a heartbeat."""
    return text[:_MOST_CHARACTERS]
