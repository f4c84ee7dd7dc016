"""The members of a crew of worker processes, and the jobs that are open to them. Pure.

What concerns one member alone is decided in ``member.py``. Here is what concerns more than one:
who is asked to join which job, that the first ones wait for the others, and that a crew without
anybody left is the end of the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quorate.errors import UserError, WorkerError
from quorate.transports.processes.decisions import (
    Ask,
    Close,
    Decision,
    Fail,
    Join,
    Leave,
    Release,
    Say,
    Welcome,
)
from quorate.transports.processes.ending import Ending
from quorate.transports.processes.member import Member
from quorate.transports.worker_status import Doing

# How long the first workers that are ready wait for the others: so what differs in one of them is
# mostly found before the first update.
GATHER_S = 10.0


class Members:
    """All members, and the jobs that are open. Events that concern more than one member.

    Args:
        devices: of each member, in words.
        timeout_s: how long one may take to reach the training loop, and to answer there.
    """

    def __init__(self, devices: Sequence[str], timeout_s: float) -> None:
        self._members = [Member(number, text, timeout_s) for number, text in enumerate(devices)]
        self._jobs: list[int] = []
        self._gather_until: float | None = None

    def __getitem__(self, number: int) -> Member:
        return self._members[number]

    def __iter__(self) -> Iterator[Member]:
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
        if member.attempt is None:
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
        decisions = self.let_join(now)
        if member.lost_at is not None:
            away_s, member.lost_at = now - member.lost_at, None
            decisions.append(Say(f"worker {number} is back after {away_s:.1f} s"))
        return decisions

    def let_join(self, now: float) -> list[Decision]:
        """Let those that are ready begin; at first, when all are or have had time enough."""
        if self._gather_until is not None:
            attempts = [m.attempt for m in self._members if m.attempt is not None]
            if now < self._gather_until and any(not attempt.ready for attempt in attempts):
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
        self, number: int, ending: Ending, doing: Doing, now: float, *, changed: str | None = None
    ) -> list[Decision]:
        """Decide when a member's process has ended, and all it had sent was heard.

        Args:
            doing: what it was at.
            changed: a file of the script that has changed since the first process was started.
        """
        member = self._members[number]
        attempt = member.attempt
        if attempt is None:
            return []
        killed = attempt.is_victim(ending)
        what = f"worker {number} ({member.devices}) {attempt.end_text(ending, doing, now)}"
        member.attempt = None
        decisions: list[Decision] = [Release(number)]
        if attempt.refusal is not None and not any(
            m.restarts.computed_in_all for m in self._members
        ):
            return [*decisions, Fail(UserError(attempt.refusal))]
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
        if self._gather_until is not None:
            yield self._gather_until
        for member in self._members:
            yield from member.due(is_computing=member.number in computing)

    def tick(self, now: float) -> list[Decision]:
        """Decide what is due for all members together; ``Member.tick`` does for each."""
        if self._gather_until is not None and self._gather_until <= now:
            return self.let_join(now)
        return []

    def _ask(self, member: Member, job: int, now: float) -> list[Decision]:
        if member.attempt is None or not member.attempt.is_here:
            return []  # it is asked when it is here
        member.attempt.asked[job] = now
        return [Ask(member.number, job)]

    def _restart(
        self,
        member: Member,
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
            what += f"; {changed} has changed since, so that no other can take its place"
        elif delay_s is None and killed:
            what += "; if this is nobody's doing, memory ran out"
        if delay_s is not None:
            member.restart_at = now + delay_s
            return [Say(f"{what}; another is starting")]
        member.given_up = what
        if all(m.given_up is not None for m in self._members):
            reasons = "\n".join(f"  {m.given_up}" for m in self._members)
            return [Fail(WorkerError(f"no worker is left, and no other is started:\n{reasons}"))]
        return [Say(f"{what}; the run goes on without it")]
