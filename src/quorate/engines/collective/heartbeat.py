"""A beat: what a rank tells the others about once a second, and that it lives."""

from __future__ import annotations

import json
import time
from typing import NamedTuple

from quorate.engines.worker_status import PHASES, Doing, WorkerStatus

MOST_BYTES = 2040  # of a packed beat
# Characters of each of its texts; JSON has six bytes for some of them.
_MOST_TEXT, _LEAST_TEXT = 400, 60


class RankIdentity(NamedTuple):
    """A rank, as long as it lives."""

    rank: int
    host: str
    mark: str  # of the host, see ``this_host.mark``
    pid: int
    device: str


class Heartbeat(NamedTuple):
    """What one rank told."""

    member: RankIdentity
    number: int  # rises with each
    phase: str = PHASES[0]
    step: int = 0
    shard: int = 0
    lasted_s: float = 0.0  # how long it is in this phase
    is_late: bool = False  # see ``Doing``
    seconds: tuple[float, ...] = (0.0,) * len(PHASES)
    shards: int = 0
    asked: str | None = None  # the signal that asked it to end
    left: str | None = None  # why it is about to leave
    verdict: str | None = None  # rank 0's: why all are to end
    lost: int | None = None  # rank 0's: which rank that is about, if it is one
    all_here: bool = False  # rank 0's: all have told that they are there

    @staticmethod
    def of(member: RankIdentity, number: int, doing: Doing | None) -> Heartbeat:
        """Return the beat of a rank that is at something."""
        if doing is None:
            return Heartbeat(member, number)
        return Heartbeat(
            member,
            number,
            doing.phase,
            doing.step,
            doing.shard,
            time.monotonic() - doing.since,
            doing.is_late,
            tuple(doing.seconds.values()),
            doing.shards,
        )

    def packed(self) -> bytes:
        """Return what ``unpacked`` takes: at most ``MOST_BYTES``."""
        for most in (_MOST_TEXT, _LEAST_TEXT):
            asked, left, verdict = (
                None if text is None else text[:most]
                for text in (self.asked, self.left, self.verdict)
            )
            beat = self._replace(asked=asked, left=left, verdict=verdict)
            packed = json.dumps(beat._asdict()).encode()
            if len(packed) <= MOST_BYTES:
                break
        return packed

    @staticmethod
    def unpacked(text: bytes) -> Heartbeat:
        """Return a beat.

        Raises:
            ValueError: it is none.
        """
        try:
            told = json.loads(text)
            # Another version of this package may tell more: it is named when ranks are compared.
            beat = Heartbeat(**{name: told[name] for name in Heartbeat._fields if name in told})
            member = RankIdentity(*told["member"][: len(RankIdentity._fields)])
        except (TypeError, LookupError) as error:
            raise ValueError(f"a beat: {error}") from error
        return beat._replace(member=member, seconds=tuple(beat.seconds))

    def status(self, heard_at: float, *, own_mark: str, show_host: bool) -> WorkerStatus:
        """Return it as the status of a worker.

        Args:
            heard_at: time.monotonic() when it came.
            own_mark: of this host: numbers of processes of others mean nothing here.
            show_host: whether there are several.
        """
        member = self.member
        return WorkerStatus(
            member.rank,
            member.device,
            member.pid if member.mark == own_mark else None,
            None,
            self.phase,
            self.step,
            self.shard,
            heard_at - self.lasted_s,
            dict(zip(PHASES, self.seconds, strict=True)),
            self.shards,
            host=member.host if show_host else None,
            is_elsewhere=member.mark != own_mark,
        )

    @property
    def place(self) -> str:
        """Who and where it is: ``rank 2 on node7``."""
        return f"rank {self.member.rank} on {self.member.host}"

    @property
    def at(self) -> str:
        """What it is at: ``forward of step 7, shard 3``."""
        if self.phase == "starting":
            return "the start of its script"
        of = f" of step {self.step:,}" if self.shards else ""
        which = f", shard {self.shard}" if self.phase in PHASES[2:] else ""
        return f"{self.phase}{of}{which}"
