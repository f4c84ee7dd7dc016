"""Dealing, plainly: see ``quorate.coordination.dealing``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from support.plain.members import Members, Task
from support.plain.open_steps import OpenStep, OpenSteps

from quorate.coordination.protocol import Compute
from quorate.coordination.rules import Rule


class Work(NamedTuple):
    """Which steps there are, and whose home shards are where. All of it is pure.

    Args:
        shards_of: V of a step.
        home_shards: from (rank, number of workers) and a step to the worker's home shards.
        lookahead: of so many steps, from the next one on, a worker begins one of its home first.
        end: steps from this number on do not exist.
    """

    shards_of: Callable[[int], int]
    home_shards: Callable[[tuple[int, int], int], range]
    lookahead: int
    end: int


@dataclass(frozen=True)
class Running:
    """A shard that is being computed, by one worker or by two, and that nobody holds."""

    step: int
    shard: int
    workers: tuple[int, ...]
    behind_at: float
    done_at: float  # if it takes as long as usual

    @property
    def who(self) -> tuple[int, int, int]:
        """What orders those that are otherwise alike."""
        return self.workers[0], self.step, self.shard

    def expected_at(self, now: float) -> float:
        """Return when it will be in; infinite if it is far behind, and nobody can tell."""
        return self.done_at if self.behind_at > now else inf


class Dealing:
    """Gives idle workers something to compute.

    Args:
        work: what there is.
        steps: the open ones. Dealing begins steps, and takes shards from their ``todo``.
        members: the workers. Dealing sets their tasks.
        rule: how many shards a step needs, how stale it may be, whether copies are made.
        most_open: how many steps may be open under any rule; bounds the memory for results.
        patience: a shard is far behind when it has taken this many times the usual time.
        run_s: how long a run of shards may usually take that is dealt at once. 0: none is.
    """

    def __init__(
        self,
        work: Work,
        steps: OpenSteps,
        members: Members,
        rule: Rule,
        *,
        most_open: float,
        patience: float,
        run_s: float,
    ) -> None:
        self.look_again_at = inf  # when someone will be far behind whom an idle worker could help
        self._work = work
        self._steps = steps
        self._members = members
        self._rule = rule
        self._most_open = most_open
        self._patience = patience
        self._run_s = run_s

    def deal(self, now: float, last_step: int) -> Iterator[Compute]:
        """Give every idle worker a shard that is of use; note when to look again if there is none.

        Args:
            now: the time.
            last_step: how many updates are made at the end.
        """
        self.look_again_at = inf
        # 1. Shards that nobody has begun.
        for worker in self._members.idle():
            if not (self._steps.have_todo or self._may_begin(last_step)):
                break
            if (choice := self._next_shard(worker, now, last_step)) is not None:
                yield self._give(worker, *choice, now)
        # 2. Copies of those that are far behind or slow.
        for worker in self._members.idle() if self._rule.copies else []:
            running = [r for step in self._steps for r in self._worth_copying(step, now)]
            if (copy := self._next_copy(worker, running, now)) is not None:
                original, reason = copy
                step = self._steps[original.step]
                slow = original.workers[0]
                yield self._give(worker, step, original.shard, reason, now, instead_of=slow)
        # 3. Another look when the next one is.
        if self._rule.copies and self._members.idle():
            wanting = [step for step in self._steps if step.wanting > 0]
            alone = [r for step in wanting for r in self._running(step, now) if len(r.workers) == 1]
            self.look_again_at = min((r.behind_at for r in alone if r.behind_at > now), default=inf)

    def _give(
        self,
        worker: int,
        step: OpenStep,
        shard: int,
        reason: str,
        now: float,
        instead_of: int | None = None,
    ) -> Compute:
        member = self._members[worker]
        count = 1 if instead_of is not None else self._count(step, worker, shard)
        if instead_of is not None:
            original = self._members[instead_of].task
            assert original is not None
            own_s, others_s = (
                self._members.expected_s(instead_of) * original.count,
                self._members.expected_s(worker),
            )
            both = [(original.since, own_s), (now, others_s)]
            each = [(since + self._patience * s, since + s) for since, s in both]
            first, last = sorted(each)
            until = first[0], min(first[1], last[1])
            step.copied[shard] = [last] if first[0] <= now else [until, last]
        step.todo.difference_update(range(shard, shard + count))
        # The version is of now and not of the step's beginning: a shard that was lost with its
        # worker is computed afresh, from the parameters as they are.
        member.task = Task(step.number, shard, self._steps.applied, now, count)
        told = (worker, step.number, shard, reason, member.rank_of, instead_of)
        lost_with = [step.lost_with.pop(s, None) for s in range(shard, shard + count)]
        known = [left for left in lost_with if left is not None]
        is_needed, lost = step.needed == step.shards, known[0] if known else None
        return Compute(*told, is_needed=is_needed, count=count, lost_with=lost)

    def _count(self, step: OpenStep, worker: int, first: int) -> int:
        """Return how many shards, from the first on, a worker is given at once.

        A run of its own that will be over before anybody would wait for a part of it. Its shards
        can be taken over as any others when it is late: then one by one.
        """
        usual_s, own = self._members[worker].usual_s, step.homes.get(worker, range(0))
        may_run = self._run_s > 0 and step.has_runs and step.needed == step.shards
        if not may_run or usual_s is None or first not in own or step.failed_on(first):
            return 1
        most = min(int(self._run_s / max(usual_s, 1e-9)), own.stop - first)
        rest = range(first + 1, first + most)
        if step.todo.issuperset(rest) and not step.failures:
            return max(1, most)
        ends = (s - first for s in rest if s not in step.todo or step.failed_on(s))
        return max(1, next(ends, most))

    # --- shards that nobody has begun -------------------------------------------------------------

    def _next_shard(
        self, worker: int, now: float, last_step: int
    ) -> tuple[OpenStep, int, str] | None:
        """Return which of the shards that nobody has begun a worker computes, and why.

        The oldest step comes first: it is the next to be applied, and the first to become stale.
        """
        for step in self._steps:
            if (choice := self._shard_of(step, worker, now)) is not None:
                return step, *choice
        if not self._may_begin(last_step):
            return None
        step = self._begin(worker, now)
        choice = self._shard_of(step, worker, now)
        assert choice is not None
        return step, *choice

    def _shard_of(self, step: OpenStep, worker: int, now: float) -> tuple[int, str] | None:
        todo = step.todo
        if step.failures:
            todo = {shard for shard in todo if self._may_try(step, worker, shard)}
        if not todo or not self._is_of_use(step, worker, now):
            return None
        if not step.homes:
            ranks = self._members.ranks()
            step.homes = {w: self._work.home_shards(r, step.number) for w, r in ranks.items()}
        own = todo.intersection(step.homes[worker])
        if own:
            return min(own), "home shard"
        # From the end of the longest run.
        runs: list[list[int]] = []
        for free in sorted(todo):
            if runs and runs[-1][-1] == free - 1:
                runs[-1].append(free)
            else:
                runs.append([free])
        return max(runs, key=len)[-1], "nobody has begun it"

    def _is_of_use(self, step: OpenStep, worker: int, now: float) -> bool:
        """Return whether the step may need one more shard than are kept and being computed.

        A quorum leaves shards over, and an idle worker could always begin one. At the beginning of
        a step it should: nobody knows who will be late. Later, to begin one more than is needed
        would be in vain. Worse, the step would be over while the worker computes, and it would
        begin the next one late, be dropped there too, and so on: out of phase for good, although it
        is as fast as the others. So it waits for the next step, unless it is needed, or will be
        done before one of those that the quorum counts on.
        """
        if step.wanting <= 0:
            return False
        # All shards are needed, or the step begins at this very event.
        if step.needed == step.shards or step.begun_at == now:
            return True
        running, own_s = self._running(step, now), self._members[worker].usual_s
        if len(running) < step.wanting or own_s is None:
            return True
        # Whoever was told to leave off is back a little after the others have begun. Without this
        # grace it would sit out every step after one in which it was late.
        if now <= step.begun_at + (self._patience - 1) * own_s:
            return True
        # Of those under way, the last that the quorum waits for. One that is far behind is expected
        # never: another shard is as good as a copy of it, and either may be first.
        expected_at = sorted(r.expected_at(now) for r in running)
        return now + own_s <= expected_at[step.wanting - 1]

    def _may_begin(self, last_step: int) -> bool:
        """Return whether one more step may be opened.

        A step that is open will be applied after all that are open already, at the latest. With so
        many open as the rule bears updates, and itself, the last one to be applied is still fresh
        enough, whichever it is. A worker that is alone would only make its own gradients stale.
        """
        alone = len(self._members) <= 1
        most = 1 if alone else min(self._rule.staleness + 1, self._most_open)
        return len(self._steps) < most and self._steps.applied + len(self._steps) < last_step

    def _begin(self, worker: int, now: float) -> OpenStep:
        """Open the next step, or one a little later that is the worker's at home."""
        rank_of, work = self._members[worker].rank_of, self._work
        number = self._steps.next_to_begin(
            work.lookahead, work.end, lambda step: len(work.home_shards(rank_of, step)) > 0
        )
        shards = work.shards_of(number)
        return self._steps.begin(number, shards, self._rule.needed(shards), now)

    def _may_try(self, step: OpenStep, worker: int, shard: int) -> bool:
        """Return whether the shard has not failed on this worker, or there is nobody else.

        A worker that crashed over a shard is back under its number, and is the same worker.
        """
        failed_on = step.failed_on(shard)
        return worker not in failed_on or self._members.are_among(failed_on)

    # --- copies -----------------------------------------------------------------------------------

    def _next_copy(
        self, worker: int, running: list[Running], now: float
    ) -> tuple[Running, str] | None:
        """Return which shard that another computes a worker had better compute too, and why."""
        for original in sorted(running, key=lambda r: (r.behind_at, r.who)):
            if original.behind_at > now:
                break
            if worker not in self._steps[original.step].failed_on(original.shard):
                return original, f"worker {original.workers[0]} is slow: far behind its usual time"
        own_s = self._members[worker].usual_s
        if own_s is None:
            return None
        for original in sorted(
            running, key=lambda r: (r.done_at, r.behind_at, r.who), reverse=True
        ):
            if original.done_at <= now + self._patience * own_s:
                break
            if worker not in self._steps[original.step].failed_on(original.shard):
                return original, f"worker {original.workers[0]} is slow"
        return None

    def _worth_copying(self, step: OpenStep, now: float) -> list[Running]:
        """Return those that one worker alone computes, and that the step cannot do without."""
        running = self._running(step, now)
        if step.wanting < len(running):  # the quorum does not wait for the others
            running.sort(key=lambda r: (r.expected_at(now), r.behind_at, r.who))
            del running[max(0, step.wanting) :]
        return [r for r in running if len(r.workers) == 1]

    def _running(self, step: OpenStep, now: float) -> list[Running]:
        """Return the shards of a step that are being computed and that nobody holds.

        A worker without a time of its own is measured by the others'; before one is known, nobody
        is behind.
        """
        usual_s_of_all = self._members.usual_s_of_all()
        running = []
        for shard, workers in self._members.computing(step.number).items():
            if shard in step.kept:
                continue  # the loser of two copies may still be computing it
            began = []
            for worker in workers:
                member = self._members[worker]
                assert member.task is not None
                usual_s = usual_s_of_all if member.usual_s is None else member.usual_s
                began.append((member.task.since, usual_s * member.task.count))
            if len(workers) == 2:
                phases = step.copied[shard]
                behind_at, done_at = next((p for p in phases if p[0] > now), phases[-1])
            else:
                ((since, usual_s),) = began
                behind_at, done_at = since + self._patience * usual_s, since + usual_s
            running.append(Running(step.number, shard, tuple(workers), behind_at, done_at))
        return running
