"""Dealing: who computes which shard, who computes a copy of it, and why.

The shards of a step are dealt to workers one at a time. Each worker has home shards, so that its
rows can be fetched ahead and its sums merge into few vectors. An idle worker takes

1. a shard that nobody has begun: one of its home shards if it can;
2. if there is none, a copy of a shard whose worker is far behind its usual time;
3. or a copy of one whose worker is so slow that the idle one will be done clearly before it.

The first copy that is done counts and the other is discarded. The choice among copies never changes
what is computed, only when it is there: a shard is the same whoever computes it.

What a dealing must get right, beside speed:

- A worker that is given a shard has it until it answers, though the step may be over long before.
  One shard too many, begun near the end of a quorum's step, makes the worker late for the next step
  and for those after it: see ``_is_of_use``.
- Times differ from run to run. Under a rule that keeps the bits they may decide who computes what
  and what is computed twice, and nothing else.
- Whoever is idle and gets nothing is asked again only when something happens. If time alone would
  change the answer, that time must be named (``look_again_at``), or the run may stand still.
- An answer takes O(log N): what is to do, who is idle and what is running are kept in order
  (``todo.py``, ``members.py``, ``running.py``), and nobody who cannot be helped is asked.

Legend: V shards of a step, N workers, t step, s shard, w worker. Times are in seconds of one
monotonic clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from math import inf
from typing import NamedTuple

from quorate.coordination.members import Member, Members, Task
from quorate.coordination.open_steps import OpenStep, OpenSteps
from quorate.coordination.protocol import Compute
from quorate.coordination.rules import Rule
from quorate.coordination.running import Expected, Running, Who


class Work(NamedTuple):
    """Which steps there are, and whose home shards are where. All of it is pure.

    Args:
        shards_of: V of a step.
        home_shards: from (rank, number of workers) and a step to the worker's home shards.
        next_home: from (rank, number of workers) and two steps to the first step at the worker's
            home from the one on and before the other, or the latter.
        lookahead: of so many steps, from the next one on, a worker begins one of its home first.
        end: steps from this number on do not exist.
    """

    shards_of: Callable[[int], int]
    home_shards: Callable[[tuple[int, int], int], range]
    next_home: Callable[[tuple[int, int], int, int], int]
    lookahead: int
    end: int


class Dealing:
    """Gives idle workers something to compute.

    Args:
        work: what there is.
        steps: the open ones. Dealing begins steps, and gives their shards to workers.
        members: the workers. Dealing gives them tasks.
        running: the shards that are being computed and that nobody holds.
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
        running: Running,
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
        self._running = running
        self._rule = rule
        # A step that is open will be applied after all that are open already, at the latest. With
        # so many open as the rule bears updates, and itself, the last one to be applied is still
        # fresh enough, whichever it is.
        self._most_open = min(rule.staleness + 1, most_open)
        self._patience = patience
        self._run_s = run_s

    def deal(self, now: float, last_step: int) -> list[Compute]:
        """Give every idle worker a shard that is of use; note when to look again if there is none.

        Args:
            now: the time.
            last_step: how many updates are made at the end.
        """
        self.look_again_at = inf
        dealt: list[Compute] = []
        idle = self._members.idle
        # 1. Shards that nobody has begun.
        if idle and self._has_more(last_step) and self._are_of_use(now):
            for worker in self._idle():
                if (choice := self._next_shard(worker, now, last_step)) is not None:
                    dealt.append(self._give(worker, *choice, now))
                    if not (idle and self._has_more(last_step)):
                        break
        # 2. Copies of those that are far behind or slow.
        if not (idle and self._running.is_asked):
            return dealt
        may_copy = self._may_copy(now)
        for worker in self._idle() if may_copy else ():
            if not self._may_copy(now):
                break
            if (copy := self._next_copy(worker, now)) is not None:
                original, reason = copy
                step, one = self._steps.by_number[original.step], original.shard
                run, slow = range(one, one + 1), original.worker
                dealt.append(self._give(worker, step, run, reason, now, instead_of=slow))
        # 3. Another look when the next one is.
        if idle and len(self._steps.ready) < len(self._steps.by_number):
            self._running.advance(now)
            self.look_again_at = self._running.next_behind_at(now)
        return dealt

    def _idle(self) -> Iterator[int]:
        """Yield the idle workers in order, without a copy: thousands may be idle at each event."""
        idle, place = self._members.idle, 0
        while place < len(idle):
            worker = idle[place]
            yield worker
            if place < len(idle) and idle[place] == worker:  # it was given nothing
                place += 1

    def _give(
        self,
        worker: int,
        step: OpenStep,
        run: range,
        reason: str,
        now: float,
        instead_of: int | None = None,
    ) -> Compute:
        """Give a worker the first shard of a run, or more of it."""
        members, shard = self._members, run.start
        member, rank_of = members.by_number[worker], members.rank_of(worker)
        count = 1 if len(run) == 1 else self._count(step, member.usual_s, run)
        copied = None
        if instead_of is not None:
            copied = self._copied(worker, members.by_number[instead_of].task, now)
        # The version is of now and not of the step's beginning: a shard that was lost with its
        # worker is computed afresh, from the parameters as they are.
        task = Task(worker, step.number, shard, self._steps.applied, now, count, member.usual_s)
        members.give(worker, task)
        self._steps.give(task, copied)
        told = (worker, step.number, shard, reason, rank_of, instead_of)
        compute = Compute(*told, is_needed=step.needed == step.shards, count=count)
        if step.lost_with:  # a worker left: rare
            lost_with = [step.lost_with.pop(s, None) for s in task.shards]
            compute.lost_with = next((w for w in lost_with if w is not None), None)
        return compute

    def _count(self, step: OpenStep, usual_s: float | None, run: range) -> int:
        """Return how many shards of a run a worker is given at once, from its first one on.

        So many that they will be over before anybody would wait for a part of them. They can be
        taken over as any others when they are late: then one by one.

        Args:
            usual_s: how long a shard usually takes the worker; None: that is not known.
            run: at the worker's home, and nobody computes or holds any of it.
        """
        may_run = self._run_s > 0 and step.has_runs and step.needed == step.shards
        first = run.start
        if not may_run or usual_s is None or step.failed_on(first):
            return 1
        most = min(int(self._run_s / max(usual_s, 1e-9)), len(run))
        if step.failures:
            failed = (s - first for s in range(first + 1, first + most) if s in step.failures)
            most = next(failed, most)
        return max(1, most)

    # --- shards that nobody has begun -------------------------------------------------------------

    def _next_shard(
        self, worker: int, now: float, last_step: int
    ) -> tuple[OpenStep, range, str] | None:
        """Return which of the shards that nobody has begun a worker computes, and why.

        The oldest step comes first: it is the next to be applied, and the first to become stale.
        """
        for step in self._steps.with_todo:
            if (choice := self._shard_of(step, worker, now)) is not None:
                return step, *choice
        if not self._may_begin(last_step):
            return None
        step = self._begin(worker, now)
        choice = self._shard_of(step, worker, now)
        assert choice is not None
        return step, *choice

    def _shard_of(self, step: OpenStep, worker: int, now: float) -> tuple[range, str] | None:
        """Return a run of a step's shards, of which a worker computes one or more, and why."""
        todo = step.todo
        member = self._members.by_number[worker]
        if not self._is_of_use(step, member.usual_s, now):
            return None
        barred = list[int]()
        if step.failures:
            barred = [s for s in step.failures if s in todo and not self._may_try(step, worker, s)]
            if len(barred) == len(todo):
                return None
        for shard in barred:
            todo.take(range(shard, shard + 1))
        try:
            own = todo.first_in(self._home(step, worker, member))
            if own is not None:
                return own, "home shard"
            # From the end of the longest run, so that what is before it stays whole: its owner
            # works from the front, and hands over few vectors.
            return todo.longest()[-1:], "nobody has begun it"
        finally:
            if barred:
                todo.add(barred)

    def _home(self, step: OpenStep, worker: int, member: Member) -> range:
        """Return the worker's home shards of a step."""
        as_of = (step.number, self._members.changes)
        if member.home_as_of != as_of:
            member.home = self._work.home_shards(self._members.rank_of(worker), step.number)
            member.home_as_of = as_of
        return member.home

    def _are_of_use(self, now: float) -> bool:
        """Return whether it may be that a step needs an idle worker for one more shard.

        A quorum that has enough under way is of no use to any if it is to none of these.
        """
        step = self._first()
        if step is None or step.needed == step.shards:
            return True
        return any(self._is_of_use(step, s, now) for s in self._members.usual_s_of_idle)

    def _is_of_use(self, step: OpenStep, own_s: float | None, now: float) -> bool:
        """Return whether the step may need one more shard than are kept and being computed.

        A quorum leaves shards over, and an idle worker could always begin one. At the beginning of
        a step it should: nobody knows who will be late. Later, to begin one more than is needed
        would be in vain. Worse, the step would be over while the worker computes, and it would
        begin the next one late, be dropped there too, and so on: out of phase for good, although it
        is as fast as the others. So it waits for the next step, unless it is needed, or will be
        done before one of those that the quorum counts on.

        Args:
            own_s: how long a shard usually takes the worker; None: that is not known.
        """
        if step.wanting <= 0:
            return False
        # All shards are needed, or the step begins at this very event.
        if step.needed == step.shards or step.begun_at == now:
            return True
        if step.running < step.wanting or own_s is None:
            return True
        # Whoever was told to leave off is back a little after the others have begun. Without this
        # grace it would sit out every step after one in which it was late.
        if now <= step.begun_at + (self._patience - 1) * own_s:
            return True
        # Of those under way, the last that the quorum waits for. One that is far behind is expected
        # never: another shard is as good as a copy of it, and either may be first.
        self._running.advance(now)
        return now + own_s <= self._running.expected_at(step.wanting - 1, now)

    def _first(self) -> OpenStep | None:
        """Return the step that was begun first of those that are open."""
        return next(iter(self._steps.by_number.values()), None)

    def _has_more(self, last_step: int) -> bool:
        """Return whether there is a shard that nobody has begun, or may be."""
        return self._steps.have_todo or self._may_begin(last_step)

    def _may_begin(self, last_step: int) -> bool:
        """Return whether one more step may be opened."""
        are_open = len(self._steps.by_number)
        if are_open:
            if are_open >= self._most_open:
                return False
            if len(self._members.by_number) <= 1:  # it would only make its own gradients stale
                return False
        return self._steps.applied + are_open < last_step

    def _begin(self, worker: int, now: float) -> OpenStep:
        """Open the next step, or one a little later that is the worker's at home."""
        work = self._work
        number = self._steps.next_unbegun
        if work.lookahead > 1:
            next_home = partial(work.next_home, self._members.rank_of(worker))
            number = self._steps.next_to_begin(work.lookahead, work.end, next_home)
        shards = work.shards_of(number)
        return self._steps.begin(number, shards, self._rule.needed(shards), now)

    def _may_try(self, step: OpenStep, worker: int, shard: int) -> bool:
        """Return whether the shard has not failed on this worker, or there is nobody else.

        A worker that crashed over a shard is back under its number, and is the same worker.
        """
        failed_on = step.failed_on(shard)
        return worker not in failed_on or self._members.are_among(failed_on)

    # --- copies -----------------------------------------------------------------------------------

    def _may_copy(self, now: float) -> bool:
        """Return whether there may be a shard that an idle worker had better compute too."""
        self._running.advance(now)
        # Clearly before: see ``_next_copy``.
        done_s = now + self._patience * self._members.usual_s_of_fastest_idle
        if not self._running.may_help(now, done_s):
            return False
        late, slow = self._most(now)
        if late != 0 and next(self._running.behind(now, late), None) is not None:
            return True
        last, _ = next(self._running.last_to_be_done(now, slow), (-inf, None))
        return last > done_s

    def _next_copy(self, worker: int, now: float) -> tuple[Who, str] | None:
        """Return which shard that another computes a worker had better compute too, and why.

        First the one that is furthest behind its worker's usual time; else the one that would be
        done last, if this worker will be done clearly before it. Clearly, because a copy costs
        twice: the loser's time, and the next step's, for which the winner may be late. Two copies
        are enough: a third would help only if both were held up.
        """
        late, slow = self._most(now)
        for original in self._running.behind(now, late):
            if worker not in self._steps.by_number[original.step].failed_on(original.shard):
                return original, f"worker {original.worker} is slow: far behind its usual time"
        own_s = self._members.by_number[worker].usual_s
        if own_s is None:
            return None
        for done_at, original in self._running.last_to_be_done(now, slow):
            if done_at <= now + self._patience * own_s:
                break
            if worker not in self._steps.by_number[original.step].failed_on(original.shard):
                return original, f"worker {original.worker} is slow"
        return None

    def _most(self, now: float) -> tuple[int | None, int | None]:
        """Return how many a step waits for, of those far behind and of the others; None: for all.

        A quorum waits for those that will be in first, and for one that is far behind only if
        the others are not enough.
        """
        step = self._first()
        if step is None or step.wanting >= step.running or len(self._steps.by_number) > 1:
            return None, None
        not_behind = self._running.not_behind(now)
        return max(0, step.wanting - not_behind), max(0, min(step.wanting, not_behind))

    def _copied(self, worker: int, original: Task | None, now: float) -> list[Expected]:
        """Return what is expected of a shard that a worker begins as another's copy."""
        assert original is not None
        own_s = self._members.expected_s(worker)
        both = [(original.since, self._expected_s(original)), (now, own_s)]
        each = [Expected(since + self._patience * s, since + s) for since, s in both]
        first, last = sorted(each)
        until = Expected(first.behind_at, min(first.done_at, last.done_at))
        return [last] if first.behind_at <= now else [until, last]

    def _expected_s(self, task: Task) -> float:
        """Return how long a task takes, if it takes as long as usual."""
        usual_s = self._members.usual_s_of_all if task.usual_s is None else task.usual_s
        return usual_s * task.count
