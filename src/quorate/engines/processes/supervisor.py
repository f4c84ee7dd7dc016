"""The members of a crew of worker processes, and the jobs that are open to them. Pure.

What concerns one member alone is decided in ``member.py``. Here is what concerns more than one:
who is asked to join which job, that the first ones wait for the others, and that a crew without
anybody left is the end of the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from quorate.coordination.run_event import BACK, JOINED, LOST, RunEvent
from quorate.engines.processes.decisions import (
    Ask,
    Close,
    Decision,
    Fail,
    Join,
    Kill,
    Leave,
    Release,
    Say,
    Welcome,
)
from quorate.engines.processes.endings import Ending
from quorate.engines.processes.member import WorkerLife
from quorate.engines.worker_status import Doing
from quorate.errors import UserError, WorkerError
from quorate.machine.limits import FIRST_WORKERS_S


@dataclass(frozen=True)
class ElasticSize:
    """What a crew is that begins with some of its members, and takes the others as they come."""

    least: int  # with how many it begins
    room: str  # what the others wait for, in words: "the Ray cluster has room for CPU=1"


class Supervisor:
    """All members, and the jobs that are open. Events that concern more than one member.

    Args:
        devices: of each member, in words.
        timeout_s: how long one may take to reach the training loop, and to answer there.
        growth: of a crew that grows; None: all members are started at once, and belong to it.
    """

    def __init__(
        self, devices: Sequence[str], timeout_s: float, growth: ElasticSize | None = None
    ) -> None:
        self._members = [
            WorkerLife(number, text, timeout_s, waits_for_room=growth is not None)
            for number, text in enumerate(devices)
        ]
        self._jobs: list[int] = []
        self._gather_until: float | None = None
        self._growth = growth
        self._short_since: float | None = None  # since when there are too few to go on
        self._said_short = False
        self._raised: set[str] = set()  # by the script, in workers that were starting

    def __getitem__(self, number: int) -> WorkerLife:
        return self._members[number]

    def __iter__(self) -> Iterator[WorkerLife]:
        return iter(self._members)

    @property
    def is_gathering(self) -> bool:
        """Whether those that are ready wait for the others, so that no update was made yet."""
        return self._gather_until is not None

    def open(self, job: int, now: float, *, gather_s: float | None = None) -> list[Decision]:
        """Begin a job.

        Args:
            gather_s: how long those that are ready wait for the others; by default not at all.
        """
        self._jobs.append(job)
        if gather_s is not None:
            self._gather_until = now + gather_s
        return [d for m in self._members for d in self._ask(m, job, now)]

    def close(self, job: int) -> list[Decision]:
        """End a job."""
        self._jobs.remove(job)
        decisions: list[Decision] = []
        for member in self._members:
            attempt = member.attempt
            # It may be computing for another job still, and come to this one only later.
            # It owes its answer to this one too, so that its time to answer goes on: one that does
            # not is lost, however short the jobs are.
            if attempt is not None and (
                job in attempt.asked or job in attempt.ready or job in attempt.joined
            ):
                attempt.ready.discard(job)
                attempt.joined.discard(job)
                decisions.append(Close(member.number, job))
        return decisions

    def here(self, number: int, now: float) -> list[Decision]:
        """Decide when a member has reached the training loop."""
        member = self._members[number]
        if member.attempt is None or member.attempt.has_handed_over:
            return []
        member.attempt.is_here = True
        asks = [d for job in self._jobs for d in self._ask(member, job, now)]
        return [Welcome(number), *asks]

    def ready(self, number: int, job: int, now: float) -> list[Decision]:
        """Decide when a member may join a job that it was asked to."""
        member = self._members[number]
        if member.attempt is None or member.attempt.asked.pop(job, None) is None:
            return []
        if job not in self._jobs:
            return []  # it is over
        member.attempt.ready.add(job)
        is_late = self._growth is not None and self._gather_until is None
        is_new = member.restarts.computed_in_all == 0 and not member.attempt.joined
        decisions = self.let_join(now)
        if member.lost_at is not None:
            away_s, member.lost_at = now - member.lost_at, None
            back = f"worker {number} is back after {away_s:.1f} s"
            decisions.append(Say(RunEvent(back, BACK, number)))
        elif is_late and is_new and member.attempt.joined:
            there = sum(m.attempt is not None and bool(m.attempt.joined) for m in self._members)
            come = f"worker {number} has joined: {there} take part"
            decisions.append(Say(RunEvent(come, JOINED, number)))
        return decisions

    def hand_over(self, number: int) -> list[Decision]:
        """Decide when a member is to leave that computes nothing: jobs are told before it ends."""
        member = self._members[number]
        attempt = member.attempt
        if attempt is None or attempt.leaves is None or attempt.has_handed_over:
            return []
        attempt.has_handed_over = True
        what = f"worker {number} ({member.devices}) {attempt.leaves}"
        leaves = [Leave(number, job, what, crashed=False) for job in sorted(attempt.joined)]
        for jobs in (attempt.asked, attempt.ready, attempt.joined):
            jobs.clear()
        return [*leaves, Kill(number)]

    def let_join(self, now: float) -> list[Decision]:
        """Let those that are ready begin; at first, when all are or have had time enough."""
        if self._gather_until is not None:
            if self._waits_for_others(now, self._gather_until):
                return []
            self._gather_until = None
        decisions: list[Decision] = []
        for member in self._members:
            if member.attempt is not None:
                decisions += [Join(member.number, job) for job in sorted(member.attempt.ready)]
                member.attempt.joined |= member.attempt.ready
                member.attempt.ready.clear()
        return decisions

    def exited(
        self,
        number: int,
        ending: Ending,
        doing: Doing,
        now: float,
        *,
        where: str | None = None,
        changed: str | None = None,
    ) -> list[Decision]:
        """Decide when a member's process has ended, and all it had sent was heard.

        Args:
            doing: what it was at.
            where: of which shard, in words; None: of a step of training.
            changed: a file of the script that has changed since the first process was started.
        """
        member = self._members[number]
        attempt = member.attempt
        if attempt is None:
            return []
        killed = attempt.is_victim(ending)
        where = where or f"step {doing.step}, shard {doing.shard}"
        how = attempt.end_text(ending, doing, where, now)
        what = f"worker {number} ({member.devices}) {how}"
        member.attempt = None
        decisions: list[Decision] = [Release(number)]
        if not any(m.restarts.computed_in_all for m in self._members):
            if attempt.refusal is not None:
                return [*decisions, Fail(UserError(attempt.refusal))]
            if attempt.raised is not None:
                # Twice the same is no accident: the script does not run in workers.
                if attempt.raised.text in self._raised:
                    return [*decisions, Fail(attempt.raised.error)]
                self._raised.add(attempt.raised.text)
        decisions += [Leave(number, job, what, not killed) for job in sorted(attempt.joined)]
        can_restart = attempt.refusal is None
        # What ran out of memory is likely to do so again.
        decisions += self._restart(
            *(member, what, now),
            killed=killed and not ending.is_out_of_memory,
            can_restart=can_restart,
            changed=changed,
        )
        return decisions + self.let_join(now)  # there is one less to wait for

    def cannot_start(
        self, number: int, error: str, now: float, *, changed: str | None = None
    ) -> list[Decision]:
        """Decide when a process could not be started."""
        what = f"worker {number} cannot be started: {error}"
        return self._restart(self._members[number], what, now, killed=False, changed=changed)

    def due(self, computing: frozenset[int] = frozenset()) -> Iterator[float]:
        """Yield the times at which there is something to decide.

        Args:
            computing: members that were given a shard and have not answered.
        """
        if self._gather_until is not None and not self._is_short:
            yield self._gather_until
        if self._short_since is not None and not self._said_short:
            yield self._short_since + FIRST_WORKERS_S
        for member in self._members:
            yield from member.due(is_computing=member.number in computing)

    @property
    def are_calm(self) -> bool:
        """Whether there is nothing to decide, at whatever time, before there is news."""
        return self._growth is None and next(self.due(), None) is None

    def tick(self, now: float) -> list[Decision]:
        """Decide what is due for all members together; ``Member.tick`` does for each."""
        if self._gather_until is not None and self._gather_until <= now and not self._is_short:
            return self.let_join(now)
        if not self._is_short:
            self._short_since, self._said_short = None, False
        elif self._short_since is None:
            self._short_since = now
        elif self._short_since + FIRST_WORKERS_S <= now and not self._said_short:
            self._said_short = True
            return [Say(self._short_text())]
        return []

    # --- a crew that grows ------------------------------------------------------------------------

    @property
    def _enough(self) -> int:
        """How many it takes to go on: at the start more than later."""
        assert self._growth is not None
        able = sum(m.given_up is None for m in self._members)
        return min(able, self._growth.least if self.is_gathering else 1)

    @property
    def _there(self) -> int:
        attempts = [m.attempt for m in self._members if m.attempt is not None]
        return sum(bool(attempt.ready or attempt.joined) for attempt in attempts)

    @property
    def _is_short(self) -> bool:
        """Whether there are too few to go on, and more may come."""
        return self._growth is not None and bool(self._jobs) and self._there < self._enough

    def _short_text(self) -> str:
        assert self._growth is not None
        there, enough = self._there, self._enough
        here = f"{there} of at least {enough} here"
        attempts = [m.attempt for m in self._members if m.attempt is not None]
        pending = sum(not attempt.is_placed for attempt in attempts)
        return f"waiting for workers: {here}; {pending} start as soon as {self._growth.room}"

    def _waits_for_others(self, now: float, until: float) -> bool:
        """Return whether those that are ready are to wait for the others."""
        if self._is_short:
            return True
        attempts = [m.attempt for m in self._members if m.attempt is not None]
        if self._growth is not None:
            attempts = [attempt for attempt in attempts if attempt.is_placed]
        return now < until and any(not attempt.ready for attempt in attempts)

    # --- one member -------------------------------------------------------------------------------

    def _ask(self, member: WorkerLife, job: int, now: float) -> list[Decision]:
        attempt = member.attempt
        if attempt is None or not attempt.is_here or attempt.has_handed_over:
            return []  # it is asked when it is here
        attempt.asked[job] = now
        return [Ask(member.number, job)]

    def _restart(
        self,
        member: WorkerLife,
        what: str,
        now: float,
        *,
        killed: bool,
        can_restart: bool = True,
        changed: str | None = None,
    ) -> list[Decision]:
        """Start another in a member's place, now or later, or give it up."""
        if member.lost_at is None:
            member.lost_at = now
        delay_s = member.restarts.ended(killed=killed) if can_restart else None
        if changed is not None:
            delay_s = None
            what += f"; {changed} was edited during the run, so no other worker can start"
        elif delay_s is None and killed:
            what += "; if nobody killed the worker, memory ran out"
        if delay_s is not None:
            member.restart_at = now + delay_s
            return [Say(RunEvent(f"{what}; another is starting", LOST, member.number))]
        member.given_up = what
        if all(m.given_up is not None for m in self._members):
            reasons = "\n".join(f"  {m.given_up}" for m in self._members)
            return [Fail(WorkerError(f"no worker is left, and no other is started:\n{reasons}"))]
        without = f"{what}; the run continues without this worker"
        return [Say(RunEvent(without, LOST, member.number))]
