"""The watch: a thread of each rank that tells the others what it is at, and ends it with them.

A rank that is lost is named on all others, whatever they are in: a shard, an exchange, an
evaluation. Rank 0 is brought to raise, so that it closes its run; the others own nothing that is to
be closed, and end at once.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from quorate.engines.collective.failure_detector import (
    EndReason,
    FailureDetector,
    HeartbeatReading,
    SilenceLimits,
)
from quorate.engines.collective.heartbeat import Heartbeat, RankIdentity
from quorate.engines.collective.heartbeat_store import HeartbeatStore
from quorate.engines.collective.links import GlooSockets
from quorate.engines.worker_status import Timesheet, WorkerStatus
from quorate.machine import this_host
from quorate.machine.resources import oom_kills

GO_ON = "started again, the ranks go on from the newest checkpoint"


class LivenessMonitor:
    """This rank's watch over all. ``close`` it.

    Args:
        board: where ranks tell; closed with this.
        own: this rank.
        size: how many there are.
        is_told: whether rank 0 has started the others, and says for all what ends them.
    """

    def __init__(
        self,
        board: HeartbeatStore,
        own: RankIdentity,
        size: int,
        times: SilenceLimits,
        *,
        is_told: bool,
    ) -> None:
        self.verdict: EndReason | None = None  # why all are to end
        self.links = GlooSockets()
        self.sheet: Timesheet | None = None  # what this rank is at; None: it is starting
        # Called by the thread of the watch, on rank 0: with the verdict, and why a rank is asked to
        # end.
        self.on_lost: Callable[[str], None] = lambda _: None
        self.on_asked: Callable[[str], None] = lambda _: None
        self.waits = 0  # how often the main thread has begun to wait for others, less its ends
        self._board, self._own, self._size, self._times = board, own, size, times
        self._is_told = is_told
        self._judge = FailureDetector(own.rank, size, times)
        self._lock = threading.Lock()  # who tells, numbers
        self._number = 0
        self._asked: str | None = None
        self._left: str | None = None
        self._all_here = False
        self._heard_asking: set[int] = set()
        self._oom_kills = oom_kills()  # before this
        self._wake, self._heeded = threading.Event(), threading.Event()
        self._is_closed = False
        self._tell()
        self._thread = threading.Thread(target=self._run, name="quorate-watch", daemon=True)
        self._thread.start()

    @property
    def session(self) -> str:
        """What only these ranks know; "" as long as they have not met."""
        return self._board.session

    def ask(self, reason: str) -> None:
        """Have rank 0 hear that this rank was asked to end. Any thread; blocks for a moment."""
        self._asked = reason
        self._tell()

    def missing(self) -> list[int]:
        """Return the ranks that have not come yet; on others than rank 0 whether rank 0 says so."""
        beats = self._board.heard().beats
        if self._own.rank == 0:
            gone = [rank for rank in range(1, self._size) if beats[rank] is None]
            if not gone and not self._all_here:
                self._all_here = True
                self._tell()
            return gone
        return [] if beats[0] is not None and beats[0].all_here else [0]

    def farewell(self) -> str | None:
        """Return who has left, and why, if somebody has."""
        for beat in self._board.heard().beats:
            if beat is not None and beat.left and beat.member.rank != self._own.rank:
                return f"{beat.place} has left: {beat.left}"
        return None

    def heed(self) -> None:
        """Note that the main thread knows of the verdict."""
        self._heeded.set()

    def explained(self) -> EndReason | None:
        """Return who is gone, where a connection broke. Blocks until that is known, or likely not.

        A rank that was killed is silent from then on: it takes some beats to know it. One that has
        left said why: see ``farewell``.
        """
        self._heeded.set()
        until = time.monotonic() + 5 * self._times.beat_s
        while time.monotonic() < until and not self._is_closed:
            heard = self._board.heard()
            found = self.verdict or self._judge.of_first(heard) or self._ended(heard)
            found = found or self._judge.quiet(heard, time.monotonic())
            if found is not None or self.farewell() is not None:
                return found
            time.sleep(self._times.beat_s / 10)
        return None

    def status(self) -> list[WorkerStatus]:
        """Return what all ranks are at, as far as this one has heard. Any thread may ask."""
        now = time.monotonic()
        heard = self._board.heard()
        beats = [*heard.beats]
        beats[self._own.rank] = self._beat(0)
        several = len({beat.member.host for beat in beats if beat is not None}) > 1
        return [
            beat.status(now, own_mark=self._own.mark, show_host=several)
            for beat in beats
            if beat is not None
        ]

    def close(self, left: str = "its loop is over") -> None:
        """End the thread, and tell the others that this rank leaves. Blocks for a moment."""
        if self._is_closed:
            return
        self._left = left
        self._tell()
        with self._lock:
            self._is_closed = True
        self._heeded.set()
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._board.close()

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_closed:
            self._tell()
            heard = self._board.heard()
            verdict = self._ended(heard) or self._judge.look(heard, time.monotonic())
            if self._is_paused(heard):
                self._judge.spare(0, time.monotonic())
            elif verdict is not None:
                self._lose(verdict)
                return
            self._hear_asking(heard)
            self._wake.wait(self._times.beat_s / 2)

    def _lose(self, verdict: EndReason) -> None:
        """End this rank, as another is lost, or this one."""
        if self._is_closed:
            return
        self.verdict = verdict
        self._tell()  # the others of rank 0
        self._end_stopped(verdict.rank)
        if self._own.rank > 0:
            self._end(verdict)
        self.links.cut()
        with suppress(Exception):  # whatever it is, this process ends
            self.on_lost(verdict.text)
        # Out of what was cut the main thread comes at once; user code of a callback may take long.
        if not self._heeded.wait(self._times.leave_s) and (
            self.waits > 0 or not self._heeded.wait(self._times.lost_s - self._times.leave_s)
        ):
            self._end(verdict)

    def _end(self, verdict: EndReason) -> None:
        if not self._is_told or self._own.rank == 0 or verdict.rank == 0:
            with suppress(OSError):
                os.write(2, f"quorate: {verdict.text}; {GO_ON}\n".encode())
        self._board.close()
        os._exit(1)

    def _tell(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._number += 1
            self._board.tell(self._beat(self._number))

    def _beat(self, number: int) -> Heartbeat:
        doing = None if self.sheet is None else self.sheet.read()
        verdict = self.verdict if self._own.rank == 0 else None
        return Heartbeat.of(self._own, number, doing)._replace(
            asked=self._asked,
            left=self._left,
            verdict=None if verdict is None else verdict.text,
            lost=None if verdict is None else verdict.rank,
            all_here=self._all_here,
        )

    def _hear_asking(self, heard: HeartbeatReading) -> None:
        if self._own.rank > 0:
            return
        for beat in heard.beats:
            if beat is not None and beat.asked and beat.member.rank not in self._heard_asking:
                self._heard_asking.add(beat.member.rank)
                self.on_asked(f"rank {beat.member.rank}: {beat.asked}")

    def _end_stopped(self, rank: int | None) -> None:
        """End a rank of this host that was stopped: it cannot do so, and torchrun waits for it."""
        beat = None if rank is None else self._board.heard().beats[rank]
        if beat is not None and self._is_stopped(beat):
            with suppress(OSError):
                os.kill(beat.member.pid, signal.SIGKILL)

    def _is_stopped(self, beat: Heartbeat) -> bool:
        member = beat.member
        return member.mark == self._own.mark and this_host.is_stopped(member.pid)

    def _is_paused(self, heard: HeartbeatReading) -> bool:
        """Whether a person has stopped rank 0 by Ctrl-Z, and with it the others that it started."""
        first = heard.beats[0]
        return (
            self._is_told and self._own.rank > 0 and first is not None and self._is_stopped(first)
        )

    def _ended(self, heard: HeartbeatReading) -> EndReason | None:
        """Return which rank of this host has ended without a word, if one has."""
        for beat in heard.beats:
            if beat is None or beat.member.rank == self._own.rank:
                continue
            is_here = beat.member.mark == self._own.mark and beat.left is None
            if is_here and this_host.has_ended(beat.member.pid):
                member = beat.member
                text = f"{beat.place} has ended (process {member.pid}), at {beat.at}"
                if oom_kills() > self._oom_kills:
                    text += "; the kernel has killed a process, as memory ran out"
                return EndReason(text, member.rank, has_ended=True)
        return None
