"""One member of a crew of worker processes: what becomes of it, decided without any process.

Pure: events and the time go in, decisions come out, to be carried out in their order before the
next event. ``transport.py`` has the processes, wires and the clock; tests have none of them.

    gone --Start--> starting --here--> here --ready--> ready --Join--> joined
                       |                |                |                |
                       +----------------+-------+--------+----------------+
                                                |     meanwhile silent: its wire is cut;
                                                |     killed: by the coordinator; or leaving:
                                                |     what it runs on is to go
                                              exited
                                                |
                               waiting for its restart, or given up

A member is a worker's number; an attempt is one process of it. Times are those of a monotonic
clock, in seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from quorate.engines.processes.decisions import AwaitEnd, Decision, Kill, Start
from quorate.engines.processes.endings import Ending
from quorate.engines.processes.restarts import Restarts
from quorate.engines.worker_status import Doing
from quorate.machine.limits import WORKER_SILENCE_S

if TYPE_CHECKING:  # what it is made of imports torch
    from quorate.engines.processes.script_as_worker import Raised


class State(Enum):
    """What a member is at."""

    GONE = "gone"  # there was no process of it yet
    STARTING = "starting"  # its process has not reached the training loop
    HERE = "here"  # it has, and takes part in no job
    READY = "ready"  # it may join a job
    JOINED = "joined"  # it takes part in a job
    SILENT = "silent"  # its wire is cut, and its process has not ended
    KILLED = "killed"  # by the coordinator, and its process has not ended
    LEAVING = "leaving"  # it has handed over, and its process has not ended
    WAITING = "waiting"  # for its restart
    GIVEN_UP = "given up"  # it is not started again


@dataclass
class ProcessLife:
    """One process of a member, from its start to its end."""

    started_at: float
    tells_exit: bool  # whether its exit is reported without asking for it
    is_placed: bool = True  # whether there is a machine that has room for it
    is_here: bool = False
    # Jobs that it owes an answer, those that are over too -> when asked, or when last heard of.
    asked: dict[int, float] = field(default_factory=dict)
    ready: set[int] = field(default_factory=set)  # jobs that it may join
    joined: set[int] = field(default_factory=set)  # jobs
    silent_since: float | None = None
    kill_reason: str | None = None  # why the coordinator killed it
    refusal: str | None = None  # why it cannot take part: a mistake of the script
    raised: Raised | None = None  # by the script, before its training loop
    leaves: str | None = None  # why it is to go, though it does well: "left host, which ..."
    has_handed_over: bool = False  # and has nothing more to do

    def is_victim(self, ending: Ending) -> bool:
        """Return whether somebody else has killed it: neither the coordinator nor itself."""
        return self.refusal is None and self.kill_reason is None and ending.is_kill

    def end_text(self, ending: Ending, doing: Doing, where: str, now: float) -> str:
        """Return how and where it ended: "was killed by signal 9 (SIGKILL) in step 3, ...".

        Args:
            doing: what it was at.
            where: of which shard, in words.
        """
        if self.has_handed_over:
            assert self.leaves is not None
            return self.leaves
        reason = ending.text(had_joined=bool(self.joined))
        if self.refusal is not None:
            reason = self.refusal
        elif self.kill_reason is not None:
            reason = self.kill_reason
        elif self.raised is not None:
            reason = f"raised {self.raised.text} while starting"
        if not self.joined:
            return f"{reason} while starting" if self.is_victim(ending) else reason
        if doing.phase in ("starting", "waiting"):
            return reason
        reason += f" in {where}, {doing.phase}"
        if doing.stage >= 0:
            reason += f" in stage {doing.stage}"
        return reason if self.kill_reason is None else f"{reason} for {now - doing.since:.0f} s"


class WorkerLife:
    """A worker's number, through all its attempts. Events that concern no other member.

    Args:
        number: of the worker.
        devices: its devices, in words.
        timeout_s: how long it may take to reach the training loop, and to answer there.
        waits_for_room: whether it may take any time until a machine has room for it.
    """

    def __init__(
        self, number: int, devices: str, timeout_s: float, *, waits_for_room: bool = False
    ) -> None:
        self.number = number
        self.devices = devices
        self.attempt: ProcessLife | None = None
        self.restarts = Restarts()
        self.restart_at: float | None = None
        self.lost_at: float | None = None  # since when it takes part in nothing
        self.given_up: str | None = None  # why
        self._timeout_s = timeout_s
        self._waits_for_room = waits_for_room

    @property
    def state(self) -> State:
        """What it is at. Any thread may ask."""
        attempt = self.attempt  # read once: another thread may end it
        if attempt is None:
            if self.given_up is not None:
                return State.GIVEN_UP
            return State.GONE if self.restart_at is None else State.WAITING
        if attempt.kill_reason is not None:
            return State.KILLED
        if attempt.silent_since is not None:
            return State.SILENT
        if attempt.has_handed_over:
            return State.LEAVING
        if attempt.joined:
            return State.JOINED
        if attempt.ready:
            return State.READY
        return State.HERE if attempt.is_here else State.STARTING

    @property
    def is_silent(self) -> bool:
        """Whether nothing more will come from it."""
        return self.attempt is None or self.attempt.silent_since is not None

    @property
    def is_wanted(self) -> bool:
        """Whether it has a process that the coordinator did not kill."""
        return self.attempt is not None and self.attempt.kill_reason is None

    @property
    def is_to_go(self) -> bool:
        """Whether what it runs on is to go, and it has not handed over yet."""
        attempt = self.attempt
        return attempt is not None and attempt.leaves is not None and not attempt.has_handed_over

    def started(self, now: float, *, tells_exit: bool, is_placed: bool = True) -> None:
        """Note that a process of it was started, or asked for."""
        assert self.attempt is None
        assert self.given_up is None
        self.restart_at = None
        self.attempt = ProcessLife(now, tells_exit, is_placed)

    def placed(self, now: float) -> None:
        """Note that a machine has room for it: its time to reach the loop begins."""
        if self.attempt is not None:
            self.attempt.is_placed, self.attempt.started_at = True, now

    def is_to_leave(self, why: str) -> None:
        """Note that what it runs on is to go: it may finish what it computes."""
        if self.attempt is not None:
            self.attempt.leaves = why

    def heard(self, now: float) -> None:
        """Note that a message came from it: it is alive, and its time to answer begins anew."""
        if self.attempt is not None and self.attempt.asked:
            self.attempt.asked = dict.fromkeys(self.attempt.asked, now)

    def not_asked(self, job: int) -> None:
        """Note that the question whether it joins a job did not reach it, and will not."""
        if self.attempt is not None:
            self.attempt.asked.pop(job, None)

    def refused(self, reason: str) -> None:
        """Note that it cannot take part."""
        if self.attempt is not None:
            self.attempt.refusal = reason

    def raised(self, raised: Raised) -> None:
        """Note that the script raised in it."""
        if self.attempt is not None:
            self.attempt.raised = raised

    def computed(self) -> None:
        """Note that it has computed a shard."""
        self.restarts.computed()

    def wire_cut(self, now: float) -> None:
        """Note that nothing more will come from it: its exit, which says why, is about to."""
        if self.attempt is not None and self.attempt.silent_since is None:
            self.attempt.silent_since = now

    def kill(self, reason: str) -> list[Decision]:
        """Kill its process, if there is one; its exit is reported when it has ended."""
        if self.attempt is None:
            return []
        self.attempt.kill_reason = reason
        return [Kill(self.number)]

    def due(self, *, is_computing: bool) -> Iterator[float]:
        """Yield the times at which ``tick`` has something to decide."""
        if self.restart_at is not None:
            yield self.restart_at
        attempt = self.attempt
        if attempt is None:
            return
        if attempt.silent_since is not None:
            # Where nobody tells of its exit it is to be looked at again and again.
            yield attempt.silent_since + (WORKER_SILENCE_S if attempt.tells_exit else 0.0)
        elif attempt.kill_reason is None:
            yield from self._answers_due(attempt, is_computing=is_computing)

    def tick(self, now: float, *, is_computing: bool) -> list[Decision]:
        """Decide what is due at this time.

        Args:
            is_computing: whether it was given a shard and has not answered: then the coordinator
                looks after it, and it comes to other messages when it is done.
        """
        if self.restart_at is not None and self.restart_at <= now:
            self.restart_at = None
            return [Start(self.number)]
        attempt = self.attempt
        if attempt is None:
            return []
        if attempt.silent_since is not None:
            return self._look_after_silence(attempt, now, was_awaited=False)
        if attempt.kill_reason is None:
            due = self._answers_due(attempt, is_computing=is_computing)
            if any(at <= now for at in due):
                what = "answer" if attempt.is_here else "start"
                if not attempt.is_placed:
                    what = "find a machine that has room for it"
                return self.kill(f"took more than worker_timeout_s={self._timeout_s:g} s to {what}")
        return []

    def still_there(self, now: float) -> list[Decision]:
        """Decide after an ``AwaitEnd`` in vain."""
        if self.attempt is None or self.attempt.silent_since is None:
            return []
        return self._look_after_silence(self.attempt, now, was_awaited=True)

    def _look_after_silence(
        self, attempt: ProcessLife, now: float, *, was_awaited: bool
    ) -> list[Decision]:
        assert attempt.silent_since is not None
        if not attempt.tells_exit and not was_awaited:
            return [AwaitEnd(self.number)]
        if now < attempt.silent_since + WORKER_SILENCE_S:
            return []
        killed = [] if attempt.kill_reason is not None else self.kill("closed its wire")
        attempt.silent_since = now
        # Perhaps nobody tells of its end, ever: its fork server hangs.
        return [*killed, AwaitEnd(self.number)]

    def _answers_due(self, attempt: ProcessLife, *, is_computing: bool) -> list[float]:
        """Return when it has to have reached the loop, or answered each job."""
        if is_computing or (self._waits_for_room and not attempt.is_placed):
            return []
        since = list(attempt.asked.values()) if attempt.is_here else [attempt.started_at]
        return [at + self._timeout_s for at in since]
