"""Coordinator: a pure state machine; events and the time go in, effects come out.

No torch, socket, thread or clock is in here. The driver (``training/drive.py``) carries out the
effects in order, and reports events. So tests can try every order of events, and a loop can
simulate a thousand workers.

A step is open from the assignment of its first shard until its update is made (``open_steps.py``).
Under "sync" and "quorum:R" a step is a batch, and one step is open at a time. Under "async" and
"bounded:K" each shard of a batch is a step, and several steps are open: at most K + 1 under
"bounded:K", or a gradient would become too stale.

Idle workers receive shards; without a shard left, an idle worker computes the late shard of a slow
worker too, and the first result counts (``dealing.py``). A worker holds the result of a shard until
the update. When workers hold enough shards of a step (V, or R of a quorum), the update is applied;
workers with further shards of the step are told to abandon the shards.

A worker is replaced after too long a silence. After a failure or a crash, a shard is tried on
another worker; further failures end the run.

A worker receives home shards first: for each rank a fixed run of neighbors, so rows can be fetched
ahead and results add up to few vectors.

    computing --(a step is ready)--> applying --(Applied)--> computing ... --> finished
        ^                               |
        +---(a holder left: its shards are dealt again)

Legend: V shards of a step, N workers, t step, s shard, w worker; a version is the number of updates
made when a shard was dealt, and so names the parameters that the shard is computed from. Times are
in seconds of one monotonic clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from math import inf

from quorate.coordination import plan, protocol
from quorate.coordination.dealing import Dealer, StepLayout
from quorate.coordination.open_steps import OpenStep, OpenSteps
from quorate.coordination.rules import Rule
from quorate.coordination.running_shards import RunningShards
from quorate.coordination.tally import Tally
from quorate.coordination.workers import Assignment, Workers
from quorate.errors import ProtocolError


class Coordinator:
    """Decides who computes which shard, and when to update, until ``last_step`` updates are made.

    Args:
        shards_of: returns V of a step; a pure function.
        first_step: number of updates applied so far.
        last_step: number of updates at the end.
        rule: the update rule.
        home_shards: returns the home shards of a worker, from (rank, N) of the worker and a step; a
            pure function. Default: V shards in N equal runs.
        next_home: returns the next step with home shards of a worker: see ``dealing.StepLayout``.
            Default: look at step after step.
        lookahead: an idle worker may begin any of so many next steps, if the step has a home shard
            of the worker. 1: steps begin in order.
        left_open: in a resumed run, steps not applied though later steps are. Only "async" and
            "bounded:K" apply steps out of order.
        most_open: how many steps may be open under any rule; bounds the memory for results.
        tally: counts of shards to continue; changed in place.
        patience: an idle worker receives a copy of a shard after this many times the usual time of
            the shard's worker. Lower the value if stragglers are short and idle workers cheap.
        attempts: how often a shard may fail before the run is stopped.
        timeout_s: a worker is replaced after this time in one shard, and after 3 times its usual
            time. None: never.
        run_s: a worker receives as many consecutive shards at once as usually take this time; 0:
            one shard at a time.

    Attributes:
        begun_at: the time at which the first worker was ready; None before.
        is_over: True once ``Finish`` or ``Abort`` was returned.
        reason: why the run ends where it ends.
    """

    def __init__(
        self,
        *,
        shards_of: Callable[[int], int],
        first_step: int,
        last_step: int,
        rule: Rule,
        home_shards: Callable[[tuple[int, int], int], range] | None = None,
        next_home: Callable[[tuple[int, int], int, int], int] | None = None,
        lookahead: int = 1,
        left_open: Iterable[int] = (),
        most_open: float = inf,
        tally: Tally | None = None,
        patience: float = 1.5,
        attempts: int = 2,
        timeout_s: float | None = None,
        run_s: float = 0.0,
    ) -> None:
        self.first_step = first_step
        self.begun_at: float | None = None
        self.tally = tally or Tally()
        self.is_over = False
        self.reason = "all steps are done"
        self._rule = rule
        self._attempts = attempts
        self._workers = Workers(timeout_s)
        running = RunningShards(self._workers, patience)
        self._steps = OpenSteps(first_step, left_open, running, rule.staleness)
        homes = home_shards or (lambda rank_of, step: plan.home_shards(rank_of, shards_of(step)))
        next_homes = next_home or partial(plan.next_home, homes)
        self._dealer = Dealer(
            StepLayout(shards_of, homes, next_homes, lookahead),
            last_step,
            self._steps,
            self._workers,
            rule,
            most_open=most_open,
            patience=patience,
            run_s=run_s,
        )
        self._events: deque[protocol.Event] = deque(maxlen=20)  # for messages of protocol errors

    def handle(
        self, event: protocol.Event, now: float, *, only_record: bool = False
    ) -> list[protocol.Effect]:
        """Process an event of time ``now``, and return the effects in order.

        Args:
            only_record: record the event, and leave the next decision to a call of ``decide``. The
                driver does so while the caller of the loop looks at an update, and may stop the
                loop.

        Raises:
            ProtocolError: the event contradicts earlier events; the error carries the last events.
        """
        self._events.append(event)
        effects = self._process(event, now)
        return effects if only_record else effects + self.decide(now)

    def decide(self, now: float) -> list[protocol.Effect]:
        """Return the next effects: shards for idle workers, an update, or the end of the run.

        The last effect is the time of the next ``Tick``, if time alone changes the decision.
        """
        effects: list[protocol.Effect] = []
        look_at = inf
        if self._steps.applying is None and not self.is_over:
            if self._steps.applied >= self._dealer.last_step:
                self.is_over = True
                return [protocol.Finish(self._steps.applied, self.reason)]
            # Shards come first: workers compute while the update is made, if the rule allows.
            effects += self._dealer.deal(now)
            if (step := self._steps.next_to_apply()) is not None:
                effects.append(self._apply(step))
            look_at = self._dealer.look_again_at
        if not self.is_over:
            # A worker already silent for too long is replaced by the next ``Tick``, due now.
            look_at = min(look_at, max(now, self._workers.overdue.first_at))
            if look_at < inf:
                effects.append(protocol.Wake(look_at))
        return effects

    def _apply(self, step: OpenStep) -> protocol.Apply:
        """Begin the update of a step."""
        self._steps.applying = step.number
        held = step.held.values()
        return protocol.Apply(
            step.number,
            tuple(sorted({each.worker for each in held})),
            shards=tuple(sorted(step.held)),
            staleness=self._steps.applied - min([each.version for each in held]),
        )

    @property
    def applied(self) -> int:
        """The number of updates made, including those before ``first_step``."""
        return self._steps.applied

    def usual_shard_s(self, worker: int) -> float | None:
        """Return the usual time of a shard on a worker in seconds; None if not known yet."""
        record = self._workers.by_number.get(worker)
        return None if record is None else record.usual_shard_s

    # --- events -----------------------------------------------------------------------------------

    def _process(self, event: protocol.Event, now: float) -> list[protocol.Effect]:
        """Record an event, and return the immediate effects."""
        match event:
            case protocol.Done():
                assignment = self._assignment(event)
                self._end_assignment(assignment, (now - assignment.since) / assignment.count)
                return self._take_results(assignment)
            case protocol.Applied(step):
                return self._close_step(step)
            case protocol.Joined(worker, place):
                self._join(worker, place, now)
            case protocol.Left():
                return self._leave(event)
            case protocol.Failed():
                assignment = self._assignment(event)
                self._end_assignment(assignment)
                return self._note_failure(assignment, event.shard)
            case protocol.Cancelled(worker):
                assignment = self._assignment(event)
                # The shard would have taken at least so long. A time above the usual time counts:
                # else a worker that never ends a shard would seem fast.
                took_s = (now - assignment.since) / assignment.count
                is_longer = took_s > self._workers.expected_s(worker)
                self._end_assignment(assignment, took_s if is_longer else None)
                if not assignment.is_unneeded:
                    raise self._error(f"worker {worker} left off what it was not told to")
            case protocol.Stop(reason):
                self._stop(reason)
            case protocol.Tick():
                # The driver sends ``Tick`` only if no event waits, so no answer has arrived by now.
                return [
                    protocol.Replace(silent.worker, f"no answer for {now - silent.since:.0f} s")
                    for silent in self._workers.replace_silent(now)
                ]
        return []

    def _join(self, worker: int, place: str, now: float) -> None:
        """Record a new worker, ready to compute."""
        if worker in self._workers.by_number:
            raise self._error(f"worker {worker} joined twice")
        self.begun_at = now if self.begun_at is None else self.begun_at
        self._workers.join(worker, place)
        if self._rule.copies and len(self._workers.by_number) > 1:
            self._steps.track_running_shards()

    def _leave(self, event: protocol.Left) -> list[protocol.Effect]:
        """Record the loss of a worker; the shards of the worker are dealt again."""
        worker = event.worker
        if worker not in self._workers.by_number:
            raise self._error(f"worker {worker} left and had not joined")
        assignment = self._workers.leave(worker)
        if assignment is not None:
            self._steps.finish(assignment)
        if not event.results_stay:
            self._steps.lose(worker)
        if assignment is None:
            return []
        self._steps.put_back(assignment.step, assignment.shards, lost_with=worker)
        step = self._steps.step_awaiting(assignment)
        if not event.crashed or step is None:
            return []
        # The shard may have crashed the worker. A replacement has the worker's number, and may try
        # the shard again; each crash counts, unlike exceptions, of which one per worker counts.
        # After a crash in a run of shards, the shards are dealt one by one, to find the shard.
        if assignment.count > 1:
            step.has_runs = False
            return []
        if len(step.note_failure(assignment.shard, worker)) < self._attempts:
            return []
        return [self._abort(assignment, assignment.shard)]

    def _assignment(
        self, event: protocol.Done | protocol.Failed | protocol.Cancelled
    ) -> Assignment:
        """Return the assignment behind a worker's answer.

        Raises:
            ProtocolError: the worker has no such assignment.
        """
        worker, step, shard = event.worker, event.step, event.shard
        record = self._workers.by_number.get(worker)
        found = record.assignment if record is not None else None
        if found is None or found.step != step or shard not in found.shards:
            raise self._error(f"worker {worker} was not computing step {step}, shard {shard}")
        return found

    def _end_assignment(self, assignment: Assignment, took_s: float | None = None) -> None:
        """Make the worker of an assignment idle again.

        Args:
            took_s: the time of a shard of the assignment. None: the usual time is not changed.
        """
        self._workers.finish(assignment.worker, took_s)
        self._steps.finish(assignment)

    def _take_results(self, assignment: Assignment) -> list[protocol.Effect]:
        """Keep or discard the results of an assignment: the first result of a shard counts."""
        worker, number, first = assignment.worker, assignment.step, assignment.shard
        step = self._steps.step_awaiting(assignment)
        if step is None:
            self._count_unneeded(assignment, assignment.shards)
            # If the update in progress fails, as a worker is lost, the shards are needed again.
            self._steps.put_back(number, assignment.shards)
            return [protocol.Discard(worker, number, first, assignment.count)]
        late = step.held.keys() & assignment.shards  # a copy was first
        wanted = [shard for shard in assignment.shards if shard not in late]
        self._steps.hold(step, wanted, assignment)
        if not late:
            return [protocol.Keep(worker, number, first, assignment.count)]
        self._count_unneeded(assignment, late)
        return [
            (protocol.Discard if shard in late else protocol.Keep)(worker, number, shard)
            for shard in assignment.shards
        ]

    def _count_unneeded(self, assignment: Assignment, shards: Iterable[int]) -> None:
        """Count the shards of an assignment whose results are in no update; count them once."""
        if not assignment.is_unneeded:
            assignment.is_unneeded = True
            step = self._steps.by_number[assignment.step]
            for shard in shards:
                self.tally.lost(assignment.worker, dropped=shard not in step.held)

    def _note_failure(self, assignment: Assignment, shard: int) -> list[protocol.Effect]:
        """Have the shards of an assignment dealt again; abort after failures on several workers."""
        step = self._steps.step_awaiting(assignment)
        # Also without an awaiting step: if the update in progress fails, all shards are needed.
        self._steps.put_back(assignment.step, assignment.shards)
        if step is None:
            return []
        step.has_runs = step.has_runs and assignment.count == 1  # deal the shards one by one
        if shard in step.held:
            return []
        failed_on = step.note_failure(shard, assignment.worker)
        if len(set(failed_on)) >= self._attempts or self._workers.are_all_in(failed_on):
            return [self._abort(assignment, shard)]
        return []

    def _abort(self, assignment: Assignment, shard: int) -> protocol.Abort:
        """End the run with the error of a shard."""
        self.is_over = True
        return protocol.Abort(assignment.worker, assignment.step, shard)

    def _close_step(self, number: int) -> list[protocol.Effect]:
        """Count a step whose update was made, and cancel shards of the step still computed."""
        if number != self._steps.applying:
            raise self._error(f"no update of step {number} was asked for")
        step, effects = self._steps.by_number[number], list[protocol.Effect]()
        for held in step.held.values():
            self.tally.applied(held.worker, self._steps.applied - held.version)
        for assignment in step.assignments:
            self._count_unneeded(assignment, assignment.shards)
            effects.append(protocol.Cancel(assignment.worker, number, assignment.shard))
        self._steps.close(number)
        return effects

    def _stop(self, reason: str) -> None:
        """End the run after the open steps with begun shards."""
        self._steps.unbegin_untouched()
        last = self._steps.applied + len(self._steps.by_number)
        if last < self._dealer.last_step:
            self._dealer.last_step, self.reason = last, reason

    def _error(self, message: str) -> ProtocolError:
        """Return an error with the last events."""
        phase = "computing" if self._steps.applying is None else "applying"
        phase = "finished" if self.is_over else phase
        return ProtocolError(f"{message} (after {self.applied} updates, {phase})", self._events)
