"""The judge: who of the ranks is lost, from what was heard of them and when. Pure.

All times follow from ``RANK_SILENCE_S``, how long a rank may be silent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from quorate.engines.collective.heartbeat import Heartbeat
from quorate.engines.worker_status import PHASES
from quorate.machine.limits import RANK_SILENCE_S

OF_USERS = PHASES[PHASES.index("fetching") : PHASES.index("pushing")]  # where user code runs
_QUIET_BEATS = 3  # that were left out by whoever is gone, when a connection broke


class SilenceLimits(NamedTuple):
    """What follows from how long a rank may be silent."""

    lost_s: float  # silent for so long: lost
    hang_s: float  # in one phase of one shard for so long: hung

    @staticmethod
    def of(timeout_s: float) -> SilenceLimits:
        """Return the times of a run whose workers may take so long for a shard."""
        return SilenceLimits(min(RANK_SILENCE_S, timeout_s), timeout_s)

    @property
    def beat_s(self) -> float:
        """Between two beats."""
        return self.lost_s / 10

    @property
    def most_s(self) -> float:
        """That ranks may take to come to the training loop, and for one exchange.

        A cold start takes its time, and so does a large model over a slow link; whoever is gone
        meanwhile is noticed long before.
        """
        return max(6 * RANK_SILENCE_S, self.hang_s)

    @property
    def leave_s(self) -> float:
        """That rank 0 may take to come out of an exchange that was cut."""
        return self.lost_s / 5


class HeartbeatReading(NamedTuple):
    """The newest beats, by rank, as one rank knows them."""

    beats: Sequence[Heartbeat | None]  # None: it has not come yet
    reached_at: float  # when the board was read last
    board: str  # what it is, in words


class EndReason(NamedTuple):
    """Why all ranks are to end."""

    text: str
    rank: int | None  # who is lost, if it is one
    has_ended: bool = False  # that is all that is known: who started it knows more


class FailureDetector:
    """Says who is lost. Rank 0 judges all, the others judge rank 0 and hear the rest from it.

    Args:
        rank: that judges.
        size: how many there are.
    """

    def __init__(self, rank: int, size: int, times: SilenceLimits) -> None:
        self._rank, self._times = rank, times
        self._judged = [r for r in range(size) if r != rank] if rank == 0 else [0]
        self._numbers: list[int | None] = [None] * size
        self._fresh_at: list[float] = [0.0] * size  # when something new was heard
        self._looked_at: float | None = None

    def look(self, heard: HeartbeatReading, now: float) -> EndReason | None:
        """Return why all ranks are to end, if they are.

        Args:
            now: time.monotonic().
        """
        was, self._looked_at = self._looked_at, now
        # Whoever was stopped for a while hears first, and judges then.
        is_awake = was is not None and now - was < self._times.lost_s / 2
        for rank, beat in enumerate(heard.beats):
            number = None if beat is None else beat.number
            if number != self._numbers[rank] or not is_awake:
                self._numbers[rank], self._fresh_at[rank] = number, now
        if (told := self.of_first(heard)) is not None:
            return told
        if not is_awake:
            return None
        return self._hung(heard) or self._silent(heard, now) or self._cut_off(heard, now)

    def spare(self, rank: int, now: float) -> None:
        """Take a rank as heard of now, though it says nothing: it will, once it may go on."""
        self._fresh_at[rank] = now

    def of_first(self, heard: HeartbeatReading) -> EndReason | None:
        """Return the verdict of rank 0, as another rank hears it."""
        first = heard.beats[0]
        if self._rank == 0 or first is None or first.verdict is None:
            return None
        return EndReason(first.verdict, first.lost)

    def quiet(self, heard: HeartbeatReading, now: float) -> EndReason | None:
        """Return who was silent for some beats: after a connection broke that is the reason."""
        for rank, beat in enumerate(heard.beats):
            silent_s = now - self._fresh_at[rank]
            is_other = rank != self._rank and beat is not None and beat.left is None
            if is_other and silent_s > _QUIET_BEATS * self._times.beat_s:
                assert beat is not None
                return EndReason(_silence(beat, silent_s), rank)
        return None

    def _hung(self, heard: HeartbeatReading) -> EndReason | None:
        # A rank that is hung does not judge itself: it would be gone before anybody said why.
        for rank in [0, *self._judged] if self._rank == 0 else self._judged:
            beat = heard.beats[rank]
            if beat is None or beat.phase not in OF_USERS or not beat.is_late:
                continue
            if beat.lasted_s > self._times.hang_s:
                return EndReason(
                    f"{beat.place} hangs: it is at {beat.at} for {beat.lasted_s:.1f} s, and "
                    f"worker_timeout_s is {self._times.hang_s:g}; turn that up if a shard may take "
                    "so long",
                    rank,
                )
        return None

    def _silent(self, heard: HeartbeatReading, now: float) -> EndReason | None:
        for rank in self._judged:
            beat, silent_s = heard.beats[rank], now - self._fresh_at[rank]
            if beat is None or beat.left is not None or silent_s <= self._times.lost_s:
                continue
            if now - heard.reached_at > 2 * self._times.beat_s:
                continue  # what it told is not to be had
            return EndReason(_silence(beat, silent_s), rank)
        return None

    def _cut_off(self, heard: HeartbeatReading, now: float) -> EndReason | None:
        away_s = now - heard.reached_at
        if away_s <= self._times.lost_s:
            return None
        first = heard.beats[0]
        others = "all other hosts" if self._rank == 0 or first is None else first.place
        return EndReason(
            f"{heard.board} was not reached for {away_s:.0f} s, and nothing heard of {others}: the "
            "host there is gone, or the link to it is cut",
            None,
        )


def _silence(beat: Heartbeat, silent_s: float) -> str:
    return (
        f"{beat.place} was not heard of for {silent_s:.0f} s: it was stopped or killed, or the "
        f"link to its host is cut; it was at {beat.at}"
    )
