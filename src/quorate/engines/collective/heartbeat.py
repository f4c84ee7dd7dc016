"""The heartbeat of a rank: a sign of life about once a second, with the rank's activity."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from quorate.engines.worker_status import PHASES, WorkerStatus

MOST_BYTES = 8184  # of a packed heartbeat, whose texts are ``shortened``
_MOST_CHARACTERS = 400


class EndReason(NamedTuple):
    """Why all ranks are to end."""

    text: str
    rank: int | None  # the lost rank; None if no single rank is lost
    has_ended: bool = False  # True: the process that started the rank knows more


class Heartbeat(msgspec.Struct, frozen=True):
    """The state of one rank. Fields that are new get defaults: versions of quorate may differ."""

    rank: int
    host: str  # the name of the host
    mark: str  # of the host, see ``this_host.mark``
    pid: int
    device: str
    number: int = 0  # rises with each heartbeat
    phase: str = PHASES[0]
    step: int = 0
    shard: int = 0
    phase_s: float = 0.0  # seconds spent in this phase of this shard
    is_late: bool = False  # see ``Doing``
    seconds: dict[str, float] = msgspec.field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    shards: int = 0
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
        return WorkerStatus(
            number=self.rank,
            device=self.device,
            pid=self.pid if is_here else None,
            thread=None,
            phase=self.phase,
            step=self.step,
            shard=self.shard,
            since=heard_at - self.phase_s,
            seconds=self.seconds,
            shards=self.shards,
            host=self.host if show_host else None,
            is_elsewhere=not is_here,
        )

    @property
    def place(self) -> str:
        """Rank and host, in words: ``rank 2 on node7``."""
        return f"rank {self.rank} on {self.host}"

    @property
    def activity(self) -> str:
        """Phase, step and shard, in words: ``forward of step 7, shard 3``."""
        if self.phase == "starting":
            return "the start of its script"
        step = f" of step {self.step:,}" if self.shards else ""
        shard = f", shard {self.shard}" if self.phase in PHASES[2:] else ""
        return f"{self.phase}{step}{shard}"


def shortened(text: str) -> str:
    """Return the first characters of a text, which a heartbeat has room for."""
    return text[:_MOST_CHARACTERS]
