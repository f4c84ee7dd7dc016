"""The liveness monitor: a thread of each rank, notices lost ranks and ends this rank then.

The failure detector, which is pure, finds lost ranks by heartbeats and their times of arrival. All
remaining ranks name the lost rank, during shards, exchanges of tensors and evaluations. Rank 0
raises an error in the main thread, and so closes the run. All further ranks have nothing to close,
and end at once.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from msgspec import structs

from quorate.engines.collective.heartbeats import (
    EndReason,
    FileHeartbeats,
    Heartbeat,
    HeartbeatReading,
    SilenceLimits,
    StoreHeartbeats,
    shortened,
)
from quorate.engines.collective.network import OpenSocket, shut_down
from quorate.engines.collective.rank_place import RankPlace
from quorate.engines.worker_status import PHASES, Timesheet, WorkerStatus
from quorate.errors import RankError
from quorate.machine import this_host
from quorate.machine.limits import FILE_POLL_S
from quorate.machine.resources import oom_kills

USER_PHASES = PHASES[PHASES.index("fetching") : PHASES.index("pushing")]  # where user code runs
_QUIET_BEATS = 3  # heartbeats that a lost rank has missed when a connection breaks


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
                    hangs=True,
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


GO_ON = "started again, the ranks go on from the newest checkpoint"


class LivenessMonitor:
    """The monitor of this rank. Close the object at the end.

    Args:
        place: of this process among the ranks.
        device: on which this rank computes.
        store: of torch.distributed, reached by all ranks; unused if the ranks have a file.

    Attributes:
        store: the heartbeats of all ranks.
    """

    def __init__(
        self, place: RankPlace, device: torch.device, store: Any, limits: SilenceLimits
    ) -> None:
        self.end: EndReason | None = None  # why all ranks are to end
        self.sockets: set[OpenSocket] = set()  # of gloo, to all ranks
        self.sheet = Timesheet()  # the activity of this rank
        self.sheet.tell("starting")
        # Rank 0: called in the monitor's thread, with the reason for the end of all ranks, and
        # with the rank and the signal that requested the end.
        self.on_lost: Callable[[str], None] = lambda _: None
        self.on_stop: Callable[[str], None] = lambda _: None
        self.waits = 0  # waits for other ranks that the main thread is in
        self._place, self._limits = place, limits
        self.store: FileHeartbeats | StoreHeartbeats
        if place.board is not None:
            self.store = FileHeartbeats(Path(place.board), place.rank, place.size)
        else:
            self.store = StoreHeartbeats(store, place.rank, place.size, limits, place.where)
        self._own = Heartbeat(
            *(place.rank, this_host.name(), this_host.mark(), os.getpid(), str(device)),
            *(self.sheet.read(), False, time.monotonic()),
        )
        self._detector = FailureDetector(place.rank, place.size, limits)
        self._lock = threading.Lock()  # for ``_own`` and ``_closed``
        self._stopping: set[int] = set()  # ranks whose signal rank 0 has heard of
        self._noticed_at: dict[int, float] = {}  # by rank: when its process was found to be gone
        self._oom_kills = oom_kills()  # before these ranks
        self._heeded, self._closed = threading.Event(), threading.Event()
        self._publish()
        self._thread = threading.Thread(target=self._run, name="quorate-liveness", daemon=True)
        self._thread.start()

    def wait_for_all(self, ended: Callable[[], str | None]) -> None:
        """Return when all ranks are here. Blocks, but not in torch: signals are handled.

        Args:
            ended: returns the end of a rank started by this process, in words; None if all run.

        Raises:
            RankError: a rank does not come.
        """
        limit_s, size = self._limits.most_s, self._place.size
        until = time.monotonic() + limit_s
        while missing := self._missing():
            if self.end is not None:
                raise RankError(self.end.text)
            if (how := ended() or self.farewell()) is not None:
                raise RankError(f"{how}, before all ranks had met")
            if time.monotonic() > until:
                names = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
                has_not = "has not" if len(missing) == 1 else "have not"
                raise RankError(
                    f"rank {names} of {size} {has_not} come to the training loop in {limit_s:g} s",
                    fix="start the same script on every rank, or turn worker_timeout_s up",
                )
            time.sleep(FILE_POLL_S)

    def _missing(self) -> list[int]:
        """Return the ranks without a heartbeat, as far as this rank can know."""
        beats = self.store.read().beats
        if self._place.rank > 0:
            return [] if beats[0] is not None and beats[0].all_here else [0]
        missing = [rank for rank in range(1, self._place.size) if beats[rank] is None]
        if not missing:
            self._publish(all_here=True)
        return missing

    def request_stop(self, signal_name: str) -> None:
        """Tell rank 0 that this rank received a signal to end. Any thread; blocks for a moment."""
        self._publish(stop_signal=signal_name)

    @property
    def stop_signal(self) -> str | None:
        """The signal that requested the end of this rank."""
        return self._own.stop_signal

    def hear_signal(self, rank: int, signal_name: str | None) -> None:
        """Note on rank 0 the signal of a rank, if any, by a heartbeat or with a step's sums."""
        if signal_name is not None and rank not in self._stopping:
            self._stopping.add(rank)
            self.on_stop(f"rank {rank}: {signal_name}")

    def farewell(self) -> str | None:
        """Return in words a rank that has left, and the reason; None if no rank has left."""
        for beat in self.store.read().beats:
            if beat is not None and beat.leaves and beat.rank != self._place.rank:
                return f"{beat.place} has left: {beat.leaves}"
        return None

    def heed(self) -> None:
        """Note that the main thread knows about the end of all ranks."""
        self._heeded.set()

    def explained(self) -> EndReason | None:
        """Return why a connection broke. Blocks until the lost rank is known, or likely unknown.

        A killed rank is silent from then on, and is noticed after some missing heartbeats. A
        rank that leaves publishes the reason: see ``farewell``.
        """
        self._heeded.set()
        until = time.monotonic() + 5 * self._limits.beat_s
        while time.monotonic() < until and not self._closed.is_set():
            reading = self.store.read()
            found = self.end or self._detector.reason_of_first(reading) or self._ended(reading)
            found = found or self._detector.quiet(reading, time.monotonic())
            if found is not None or self.farewell() is not None:
                self.end = self.end or found
                return found
            time.sleep(self._limits.beat_s / 10)
        return None

    def status(self) -> list[WorkerStatus]:
        """Return the activities of all ranks, by their last heartbeats. Any thread may call."""
        now = time.monotonic()
        beats = [beat for beat in self.store.read().beats if beat is not None]
        beats = [self._current() if beat.rank == self._place.rank else beat for beat in beats]
        several = len({beat.host for beat in beats}) > 1
        return [beat.status(now, own_mark=self._own.mark, show_host=several) for beat in beats]

    def close(self, why: str) -> None:
        """End the thread, and tell all ranks why this rank leaves. Blocks for a moment."""
        if self._closed.is_set():
            return
        self._publish(leaves=shortened(why))
        with self._lock:
            self._closed.set()
        self._heeded.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self.store.close()

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed.is_set():
            self._publish()
            reading, now = self.store.read(), time.monotonic()
            end = self._ended(reading) or self._detector.look(reading, now)
            if self._is_paused(reading):
                self._detector.spare(0, now)
            elif end is not None:
                self._end_all(end)
                return
            for beat in reading.beats if self._place.rank == 0 else ():
                if beat is not None:
                    self.hear_signal(beat.rank, beat.stop_signal)
            self._closed.wait(self._limits.beat_s / 2)

    def _end_all(self, end: EndReason) -> None:
        """End this rank, because a rank is lost."""
        if self._closed.is_set():
            return
        self.end = end
        if self._place.rank == 0:
            self._publish(end=end._replace(text=shortened(end.text)))
        self._kill_stopped(end.rank)
        if self._place.rank > 0:
            self._exit(end)
        shut_down(self.sockets)
        with suppress(Exception):  # this process ends, whatever is raised
            self.on_lost(end.text)
        # The main thread leaves an exchange at once; user code of a callback may take long.
        limits = self._limits
        if not self._heeded.wait(limits.leave_s) and (
            self.waits > 0 or not self._heeded.wait(limits.lost_s - limits.leave_s)
        ):
            self._exit(end)

    @property
    def prints_end(self) -> bool:
        """True if this rank prints the reason for the end of all ranks, or if none is known.

        The first rank of each host prints the reason; so does the second, if the first is lost.
        """
        end, place = self.end, self._place
        if end is None or place.local_rank == 0:
            return True
        return place.local_rank == 1 and end.rank == place.rank - 1 and not end.hangs

    def _exit(self, end: EndReason) -> None:
        if self._place.rank > 0:
            self._publish(end=end._replace(text=shortened(end.text)))
        if self.prints_end:
            with suppress(OSError):
                os.write(2, f"quorate: {end.text}; {GO_ON}\n".encode())
        self.store.close()
        os._exit(1)

    def _publish(self, **changes: Any) -> None:
        with self._lock:
            if not self._closed.is_set():
                self._own = structs.replace(self._current(), number=self._own.number + 1, **changes)
                self.store.publish(self._own)

    def _current(self) -> Heartbeat:
        """Return the newest heartbeat of this rank, with the activity at this moment."""
        doing, now = self.sheet.read(), time.monotonic()
        return structs.replace(self._own, doing=doing, is_late=doing.is_late, sent_at=now)

    def _kill_stopped(self, rank: int | None) -> None:
        """Kill a stopped rank of this host: torchrun would wait for the end of the rank."""
        beat = None if rank is None else self.store.read().beats[rank]
        if beat is not None and self._is_stopped(beat):
            with suppress(OSError):
                os.kill(beat.pid, signal.SIGKILL)

    def _is_stopped(self, beat: Heartbeat) -> bool:
        return beat.mark == self._own.mark and this_host.is_stopped(beat.pid)

    def _is_paused(self, reading: HeartbeatReading) -> bool:
        """Return True if Ctrl-Z has stopped the rank 0 that started this rank."""
        first = reading.beats[0]
        was_started_by_first = self._place.board is not None and self._place.rank > 0
        return was_started_by_first and first is not None and self._is_stopped(first)

    def _ended(self, reading: HeartbeatReading) -> EndReason | None:
        """Return a rank of this host that has ended without a word; None if no rank has.

        A rank that its own monitor has ended has published the reason.
        """
        for beat in reading.beats:
            if beat is None or beat.rank == self._place.rank:
                continue
            is_here = beat.mark == self._own.mark and beat.leaves is None
            if is_here and this_host.has_ended(beat.pid):
                noticed_at = self._noticed_at.setdefault(beat.rank, time.monotonic())
                newest = self.store.read()
                last = newest.beats[beat.rank] or beat
                # Wait for what the rank has published last.
                if newest.reached_at < noticed_at or last.leaves is not None:
                    continue
                if last.end is not None:
                    return last.end
                text = f"{beat.place} has ended (process {beat.pid}), at {beat.activity}"
                if oom_kills() > self._oom_kills:
                    text += "; the kernel has killed a process, as memory ran out"
                return EndReason(text, beat.rank, has_ended=True)
        return None
