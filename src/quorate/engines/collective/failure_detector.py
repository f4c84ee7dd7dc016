"""The failure detector: finds lost ranks by heartbeats and their times of arrival. Pure.

All times follow from ``RANK_SILENCE_S``, how long a rank may be silent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from quorate.engines.collective.heartbeat import EndReason, Heartbeat
from quorate.engines.worker_status import PHASES
from quorate.machine.limits import RANK_SILENCE_S

USER_PHASES = PHASES[PHASES.index("fetching") : PHASES.index("pushing")]  # where user code runs
_QUIET_BEATS = 3  # heartbeats that a lost rank has missed when a connection breaks


class SilenceLimits(NamedTuple):
    """Time limits of a run."""

    lost_s: float  # a rank that is silent for so long is lost
    hang_s: float  # a rank that is in one phase of one shard for so long hangs

    @staticmethod
    def of(timeout_s: float) -> SilenceLimits:
        """Return the limits of a run whose workers may take ``timeout_s`` for a shard."""
        return SilenceLimits(min(RANK_SILENCE_S, timeout_s), timeout_s)

    @property
    def beat_s(self) -> float:
        """The time between two heartbeats."""
        return self.lost_s / 10

    @property
    def most_s(self) -> float:
        """The limit for the way to the training loop, and for an exchange of tensors.

        A cold start is slow, and so is a large model over a slow link. A lost rank
        is noticed much earlier.
        """
        return max(6 * RANK_SILENCE_S, self.hang_s)

    @property
    def leave_s(self) -> float:
        """The limit for rank 0 to leave an exchange whose connections are closed."""
        return self.lost_s / 5


class HeartbeatReading(NamedTuple):
    """The newest heartbeats, as this rank has read them."""

    beats: Sequence[Heartbeat | None]  # by rank; None before the first heartbeat
    reached_at: float  # when the store was read last, by ``time.monotonic()``
    store: str  # the store, in words


class FailureDetector:
    """Detects lost ranks. Rank 0 judges all ranks; all further ranks judge rank 0 alone.

    Args:
        rank: the rank of this process.
        size: number of ranks.
    """

    def __init__(self, rank: int, size: int, limits: SilenceLimits) -> None:
        self._rank, self._limits = rank, limits
        self._judged = range(size) if rank == 0 else range(1)
        self._numbers: list[int | None] = [None] * size  # of the newest heartbeats
        self._fresh_at = [0.0] * size  # when they came
        self._looked_at: float | None = None

    def look(self, reading: HeartbeatReading, now: float) -> EndReason | None:
        """Return why all ranks are to end; None if no rank is lost.

        Args:
            now: ``time.monotonic()``. Call about twice for each heartbeat.
        """
        limits, was, self._looked_at = self._limits, self._looked_at, now
        # A rank that was stopped for a while reads first, and judges at the next look.
        is_awake = was is not None and now - was < limits.lost_s / 2
        for rank, beat in enumerate(reading.beats):
            number = None if beat is None else beat.number
            if number != self._numbers[rank] or not is_awake:
                self._numbers[rank], self._fresh_at[rank] = number, now
        if (end := self.reason_of_first(reading)) is not None:
            return end
        if not is_awake:
            return None
        reason = self._hung(reading)
        if reason is None and now - reading.reached_at <= 2 * limits.beat_s:
            reason = self._silent(reading, now, self._judged, limits.lost_s)
        return reason or self._cut_off(reading, now)

    def spare(self, rank: int, now: float) -> None:
        """Count a silent rank as heard now: the rank continues when a person lets it."""
        self._fresh_at[rank] = now

    def reason_of_first(self, reading: HeartbeatReading) -> EndReason | None:
        """Return the reason that rank 0 has published for the end of all ranks, if any."""
        first = reading.beats[0]
        return None if self._rank == 0 or first is None else first.end

    def quiet(self, reading: HeartbeatReading, now: float) -> EndReason | None:
        """Return a rank with missing heartbeats, as the reason of a broken connection."""
        ranks, limit_s = range(len(reading.beats)), _QUIET_BEATS * self._limits.beat_s
        return self._silent(reading, now, ranks, limit_s)

    def _hung(self, reading: HeartbeatReading) -> EndReason | None:
        # Rank 0 judges itself too. Another rank that hangs does not: that rank would have ended
        # before rank 0 had said why.
        for rank in self._judged:
            beat = reading.beats[rank]
            if beat is None or beat.doing.phase not in USER_PHASES or not beat.is_late:
                continue
            if beat.phase_s > self._limits.hang_s:
                return EndReason(
                    f"{beat.place} hangs: it is at {beat.activity} for {beat.phase_s:.1f} s, and "
                    f"worker_timeout_s is {self._limits.hang_s:g}; turn that up if a shard may "
                    "take so long",
                    rank,
                )
        return None

    def _silent(
        self, reading: HeartbeatReading, now: float, ranks: range, limit_s: float
    ) -> EndReason | None:
        for rank in ranks:
            beat, silent_s = reading.beats[rank], now - self._fresh_at[rank]
            if beat is None or beat.leaves is not None or rank == self._rank:
                continue
            if silent_s > limit_s:
                return EndReason(
                    f"{beat.place} was not heard of for {silent_s:.0f} s: it was stopped or "
                    f"killed, or the link to its host is cut; it was at {beat.activity}",
                    rank,
                )
        return None

    def _cut_off(self, reading: HeartbeatReading, now: float) -> EndReason | None:
        away_s, first = now - reading.reached_at, reading.beats[0]
        if away_s <= self._limits.lost_s:
            return None
        others = "all other hosts" if self._rank == 0 or first is None else first.place
        return EndReason(
            f"{reading.store} was not reached for {away_s:.0f} s, and nothing heard of {others}: "
            "the host there is gone, or the link to it is cut",
            None,
        )
