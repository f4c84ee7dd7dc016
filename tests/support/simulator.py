"""A run without torch, threads or waiting: a Coordinator drives workers that only pretend.

The simulation carries out effects as ``quorate.training.drive`` and a transport do, on a virtual
clock, so a thousand workers and hours of stragglers take seconds. A shard's result is a string and
adding is "(left+right)", which is not associative: a sum shows the exact order in which it was
added.

    run = Simulation(shards=4, steps=10, time_s=lambda worker, step, shard: 1.0 + worker)
    run.at(0.0, Joined(0), Joined(1))
    run.at(3.5, Left(1, "killed"))  # or with results_stay=True, and what it held counts
    run.at(7.0, Joined(1))
    run.run()
    assert run.finish == Finish(10, "all steps are done")

It keeps its own books of what is open, kept, applied, late and stale, and knows of the rule only
how many shards a step needs and how stale it may be. After every event it is checked that

- a busy worker gets no shard, and nobody gets one that is kept already, or of a step that is
  applied, or that may not be begun yet: too many are open, or it is too far ahead;
- a run of several shards is the worker's own and short, all of it is needed, and it is answered,
  taken over and lost as its shards would be one by one;
- a shard has at most two copies running, and a second only when there is nothing else to do; of a
  rule that makes no copies, none is ever computed in vain;
- in the middle of a step no shard is begun that its quorum will not need;
- no worker is idle while it may compute a shard that is needed and in nobody's hands, or begin a
  step, not even while an update is made;
- every result is either kept or discarded, at once, and discarded only if it is too late;
- at an update, each of the shards that are needed, and no other, is kept by exactly one worker
  whose results are still there; none is staler than the rule allows; the sum is the string of the
  tree over just those: it does not show who computed what;
- no update is put off that would leave time for all the others, and the oldest comes first;
- whoever computes a shard of a step that is applied is told so, at once, and nobody else is;
- every step is applied exactly once, and in order where shards are not applied one by one; what is
  left open is known after every update;
- after a stop, what is under way is finished and nothing is begun;
- a worker is replaced once, on a tick, and after the timeout and 3 times its usual time; nobody who
  is due for it is forgotten;
- a run is aborted only over a shard that failed as often as is allowed, or on everyone, and then it
  is;
- the tally is right.

Whatever breaks one of these raises ``InvariantError`` with the last events and effects.

Legend: V shards of a step, N workers, t step, s shard, w worker. Times are virtual seconds.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from support.judge import Judge
from support.run_books import OpenStep, Results, Task, Worker
from support.shown_sums import add, leaf, whole_sum

from quorate.coordination import plan
from quorate.coordination.coordinator import Coordinator
from quorate.coordination.protocol import (
    Abort,
    Applied,
    Apply,
    Cancel,
    Cancelled,
    Compute,
    Discard,
    Done,
    Effect,
    Event,
    Failed,
    Finish,
    Joined,
    Keep,
    Left,
    Replace,
    Stop,
    Tick,
    Wake,
)
from quorate.coordination.rules import Rule, Sync
from quorate.coordination.tally import Tally
from quorate.coordination.tree import TreeSum, tree_sum


def one_second(worker: int, step: int, shard: int) -> float:
    """Every shard takes a second."""
    return 1.0


def never(worker: int, step: int, shard: int) -> bool:
    """No shard fails."""
    return False


@dataclass(order=True)
class _Due:
    """An event to come, which is void once ``still`` says no: its sender has left."""

    at: float
    order: tuple[int, int]
    event: Event = field(compare=False)
    still: Callable[[], bool] = field(compare=False)


class Simulation(Judge):
    """A coordinator and the workers that its script lets come and go.

    Args:
        shards: V, of every step or as a function of the step.
        steps: updates applied at the end.
        rule: what makes an update.
        home_shards: see ``Coordinator``.
        lookahead: see ``Coordinator``.
        most_open: see ``Coordinator``.
        first_step: updates applied before.
        left_open: steps that are not in them, though later ones are.
        tally: of before.
        time_s: how long worker w takes for shard s of step t; infinite: it hangs until killed.
        fails: whether user code raises there, at the end of that time.
        leaves_off_s: how long a worker takes to leave off a shard that is not wanted any more;
            infinite: it goes on to its end.
        apply_s: how long an update takes. At 0 nothing comes between ``Apply`` and ``Applied``, as
            in ``drive``; else workers may come, go and report meanwhile.
        patience: see ``Coordinator``.
        attempts: see ``Coordinator``.
        timeout_s: see ``Coordinator``.
        run_s: see ``Coordinator``.
        end_s: how long it takes to end a worker that is replaced. It may report meanwhile.
        start_s: how long it takes after that until it has joined again.
        results_stay: whether its results outlive it.
        coordinator: makes the one that decides.
    """

    def __init__(
        self,
        *,
        shards: int | Callable[[int], int],
        steps: int,
        rule: Rule | None = None,
        home_shards: Callable[[tuple[int, int], int], range] | None = None,
        lookahead: int = 1,
        most_open: float = math.inf,
        first_step: int = 0,
        left_open: Iterable[int] = (),
        tally: Tally | None = None,
        time_s: Callable[[int, int, int], float] = one_second,
        fails: Callable[[int, int, int], bool] = never,
        leaves_off_s: float = math.inf,
        apply_s: float = 0.0,
        patience: float = 1.5,
        attempts: int = 2,
        timeout_s: float | None = None,
        run_s: float = 0.0,
        end_s: float = 0.0,
        start_s: float = 1.0,
        results_stay: bool = False,
        coordinator: Callable[..., Coordinator] = Coordinator,
    ) -> None:
        self.shards_of = shards if callable(shards) else lambda step: shards
        self.rule = rule or Sync()
        self.applied = first_step
        self.steps = steps
        self.now = 0.0
        self.order: list[int] = []  # the steps applied
        self.sums: list[str] = []  # of each
        self.applied_at: list[float] = []
        self.staleness: list[int] = []  # of every gradient applied
        self.fates: dict[str, Counter[int]] = {  # of every shard: worker -> how many
            fate: Counter() for fate in ("fresh", "stale", "dropped", "copies")
        }
        self.computed: Counter[int] = Counter()  # worker -> results of its that were kept
        self.copies = 0  # shards that were dealt while another worker was computing them
        self.replaced: list[int] = []  # workers
        self.runs = 0  # of several shards that were dealt
        self.finish: Finish | None = None
        self.abort: Abort | None = None
        self.log: deque[tuple[float, Event, Sequence[Effect]]] = deque(maxlen=50)
        left_open = list(left_open)
        self.coordinator = coordinator(
            shards_of=self.shards_of,
            first_step=first_step,
            last_step=steps,
            rule=self.rule,
            home_shards=home_shards,
            lookahead=lookahead,
            most_open=most_open,
            left_open=left_open,
            tally=tally,
            patience=patience,
            attempts=attempts,
            timeout_s=timeout_s,
            run_s=run_s,
        )
        self._run_s = run_s
        # By step and shard that two compute: how long each took usually when the second began.
        self._frozen: dict[tuple[int, int], dict[int, float]] = {}
        self._single: set[int] = set()  # steps in which a run crashed, or a shard of it failed
        self._home_shards = home_shards or (
            lambda rank_of, step: plan.home_shards(rank_of, self.shards_of(step))
        )
        self._lookahead, self._most_open, self._patience = lookahead, most_open, patience
        self._attempts, self._timeout_s = attempts, timeout_s
        self._end_s, self._start_s, self._results_stay = end_s, start_s, results_stay
        self._time_s, self._fails, self._apply_s = time_s, fails, apply_s
        self._leaves_off_s = leaves_off_s
        self._queue: list[_Due] = []
        self._count = itertools.count()
        self._events = 0
        self._wake_at: float | None = None
        self._workers: dict[int, Worker] = {}
        self._results: dict[int, Results] = {}  # of workers who are or were there
        self._open: dict[int, OpenStep] = {}
        self._closed = set(range(first_step + len(left_open))) - set(left_open)  # steps applied
        self._end = steps  # updates applied at the end, stopped or not
        self._applying: tuple[Apply, str] | None = None  # and the sum that was collected for it
        self._to_tell: set[tuple[int, int, int]] = set()  # who computes (t, s) in vain
        before = self.coordinator.tally.to_json()
        self._fates_before = {fate: Counter(dict(enumerate(before[fate]))) for fate in self.fates}
        self._staleness_before = before["staleness"]

    # --- what a test calls ------------------------------------------------------------------------

    def at(self, time_s: float, *events: Joined | Left | Stop) -> None:
        """Script events for a time. At one time, they come in the order they were scripted.

        A worker cannot leave while its replacement starts, nor join when that has: void.
        """
        for event in events:
            self._post(time_s, event, lambda event=event: self._is_possible(event))

    def run(self) -> None:
        """Run to ``Finish`` or ``Abort``.

        Raises:
            InvariantError: an invariant does not hold, or nothing will happen any more.
        """
        while self.finish is None and self.abort is None:
            self.advance()

    def advance(self) -> Sequence[Effect]:
        """Let the next event happen, and return the effects that it had."""
        event = self._receive()
        self._events += 1
        self._happen(event)
        effects = self.coordinator.handle(event, self.now)
        self.log.append((self.now, event, effects))
        self._wake_at = None
        for effect in effects:
            self._carry_out(effect, event)
        self._check(event)
        return effects

    # --- events -----------------------------------------------------------------------------------

    def _post(self, at: float, event: Event, still: Callable[[], bool]) -> None:
        # An update that takes no time ends before anything else happens at that time.
        rank = 0 if isinstance(event, Applied) else 1
        heapq.heappush(self._queue, _Due(at, (rank, next(self._count)), event, still))

    def _is_possible(self, event: Joined | Left | Stop) -> bool:
        if isinstance(event, Stop):
            return True
        return (event.worker in self._workers) == isinstance(event, Left)

    def _receive(self) -> Event:
        """The next event, or a tick where the coordinator asked to be woken before."""
        while self._queue and not self._queue[0].still():
            heapq.heappop(self._queue)
        if self._wake_at is not None and not (self._queue and self._queue[0].at <= self._wake_at):
            self.now = self._wake_at
            return Tick()
        if not self._queue:
            raise self._violation("the run is not over, and nothing will happen any more")
        due = heapq.heappop(self._queue)
        self.now = due.at
        return due.event

    def _happen(self, event: Event) -> None:
        """What the event means for the workers, before the coordinator knows of it."""
        match event:
            case Joined(worker):
                self._workers[worker] = Worker()
                self._results.setdefault(worker, Results())
            case Left(worker):
                member = self._workers.pop(worker)
                if not event.results_stay:
                    for number in self._results.pop(worker).sums:
                        self._open[number].kept_now = None
                    if self._applying is not None and worker in self._applying[0].holders:
                        self._applying = None
                task = member.task
                if event.crashed and task is not None:
                    self._note_run(task)
                if event.crashed and member.task is not None and len(member.task.shards) == 1:
                    self._note_failure(worker, member.task.step, member.task.shards[0])
                if member.is_replaced:
                    back = Joined(worker)
                    self._post(self.now + self._start_s, back, lambda: self._is_possible(back))
            case Done(worker, step):
                task = self._end_task(worker)
                self._workers[worker].times_s.append((self.now - task.since) / len(task.shards))
                for shard in task.shards:
                    self._results[worker].pending[step, shard] = task
            case Failed(worker, step, shard):
                self._note_run(self._end_task(worker))
                self._note_failure(worker, step, shard)
            case Cancelled(worker):
                task = self._end_task(worker)
                took_s = (self.now - task.since) / len(task.shards)
                if took_s > self._expected_s(self._workers[worker]):
                    self._workers[worker].times_s.append(took_s)
            case Applied(step):
                self._end_step(step)
            case Stop():
                # A step that nobody computes or holds anything of is not under way any more.
                idle = [t for t in self._open if not self._kept(t) and not self._running(t)]
                for step in idle:
                    del self._open[step]
                self._end = min(self._end, self.applied + len(self._open))

    def _end_task(self, worker: int) -> Task:
        member = self._workers[worker]
        assert member.task is not None
        task, member.task = member.task, None
        return task

    def _end_step(self, step: int) -> None:
        assert self._applying is not None
        self.order.append(step)
        self.sums.append(self._applying[1])
        self.applied_at.append(self.now)
        self._applying = None
        for worker, results in self._results.items():
            for shard in range(self.shards_of(step)) if step in results.sums else ():
                if (version := results.versions.pop((step, shard), None)) is not None:
                    stale = self.applied - version
                    self.staleness.append(stale)
                    self.fates["stale" if stale else "fresh"][worker] += 1
        kept = self._kept(step)
        for worker, member in self._workers.items():
            if member.task is not None and member.task.step == step:
                for shard in member.task.shards:
                    self._lose(worker, member.task, shard, kept)
                self._to_tell.add((worker, step, member.task.shards[0]))
        for results in self._results.values():
            results.sums.pop(step, None)
        del self._open[step]
        self._closed.add(step)
        self.applied += 1

    def _lose(self, worker: int, task: Task, shard: int, kept: set[int]) -> None:
        if shard not in task.lost:
            task.lost.add(shard)
            self.fates["copies" if shard in kept else "dropped"][worker] += 1

    def _note_failure(self, worker: int, step: int, shard: int) -> None:
        if self._is_wanted(step, shard):
            self._open[step].failed_on.setdefault(shard, []).append(worker)

    # --- effects ----------------------------------------------------------------------------------

    def _carry_out(self, effect: Effect, event: Event) -> None:
        if self.finish is not None or self.abort is not None:
            raise self._violation(f"the run is over, and then {effect}")
        match effect:
            case Compute():
                self._compute(effect)
            case Keep(worker, step, first, count):
                for shard in range(first, first + count):
                    if not self._is_wanted(step, shard):
                        raise self._violation(f"nobody needs this result any more: {effect}")
                    results, task = self._result(effect, shard)
                    tree = results.sums.setdefault(step, TreeSum(self.shards_of(step), add))
                    tree.put((0, shard), leaf(step, shard))
                    results.versions[step, shard] = task.version
                    self._open[step].kept_now = None
                    self.computed[worker] += 1
            case Discard(worker, step, first, count):
                kept = self._kept(step) if step in self._open else set()
                for shard in range(first, first + count):
                    if self._is_wanted(step, shard) or not self.rule.copies:
                        raise self._violation(f"it was not in vain: {effect}")
                    _, task = self._result(effect, shard)
                    self._lose(worker, task, shard, kept)
            case Cancel(worker, step, shard):
                if (worker, step, shard) not in self._to_tell or not self.rule.copies:
                    raise self._violation(f"it is not in vain: {effect}")
                self._to_tell.remove((worker, step, shard))
                self._cancel(effect)
            case Apply():
                self._apply(effect)
            case Replace(worker):
                if not isinstance(event, Tick):
                    raise self._violation(f"a result may be under way, and yet {effect}")
                self._replace(effect)
            case Wake(at):
                # At once is allowed, but not after a tick: that would never end.
                if at < self.now or (at == self.now and isinstance(event, Tick)):
                    raise self._violation(f"at {self.now} the coordinator asks for {effect}")
                if self._wake_at is not None:
                    raise self._violation(f"the coordinator asks for two ticks: {effect}")
                self._wake_at = at
            case Abort(_, step, shard):
                failed_on = self._open[step].failed_on.get(shard, []) if step in self._open else []
                if len(failed_on) < self._attempts and not self._workers.keys() <= set(failed_on):
                    raise self._violation(f"someone could try shard {shard} again: {effect}")
                self.abort = effect
            case Finish(step):
                if step != self.applied or step != self._end:
                    raise self._violation(f"it is not {self._end} updates at {effect}")
                self.finish = effect

    def _compute(self, effect: Compute) -> None:
        worker, number = effect.worker, effect.step
        member = self._workers.get(worker)
        if member is None or member.task is not None:
            raise self._violation(f"worker {worker} is not idle: {effect}")
        if effect.rank_of != self._rank_of(worker):
            raise self._violation(f"worker {worker} is at {self._rank_of(worker)}: {effect}")
        if number not in self._open:
            self._begin(effect)
        shards = range(effect.shard, effect.shard + effect.count)
        for shard in shards:
            if shard not in range(self.shards_of(number)) or self._applying:
                raise self._violation(f"there is no such shard to compute now: {effect}")
            if shard in self._kept(number):
                raise self._violation(f"shard {shard} is kept already: {effect}")
            runners = self._running(number).get(shard, [])
            if runners and (not self.rule.copies or len(runners) > 1 or self._have_work([worker])):
                raise self._violation(f"{len(runners)} copies of it are running: {effect}")
            if not runners and self._is_in_vain(worker, number):
                raise self._violation(f"the quorum will be there without it: {effect}")
            if not self._may_compute(worker, number, {shard}):
                raise self._violation(f"shard {shard} failed there and others could try: {effect}")
            if runners and effect.count > 1:
                raise self._violation(f"shard {shard} is a copy, and copies come alone: {effect}")
            if runners:
                both = [*runners, worker]
                self._frozen[number, shard] = {w: self._expected_s(self._workers[w]) for w in both}
            self.copies += len(runners)
        if effect.count > 1:
            self._check_run(effect, member)
        task = member.task = Task(number, shards, self.applied, self.now)
        time_s = 0.0
        for shard in shards:
            time_s += self._time_s(worker, number, shard)
            if self._fails(worker, number, shard):
                self._post_of(worker, task, time_s, Failed(worker, number, shard))
                return
        self._post_of(worker, task, time_s, Done(worker, number, effect.shard))

    def _note_run(self, task: Task) -> None:
        """Note that a run ended badly, unless nobody waits for any of it."""
        if len(task.shards) > 1 and any(self._is_wanted(task.step, s) for s in task.shards):
            self._single.add(task.step)

    def _check_run(self, effect: Compute, member: Worker) -> None:
        """Whether a run is short, of the worker's own, and nobody waits for a part of it."""
        self.runs += 1
        home = self._home_shards(self._rank_of(effect.worker), effect.step)
        is_home = effect.shard in home and effect.shard + effect.count - 1 in home
        if self.rule.needed(self.shards_of(effect.step)) < self.shards_of(effect.step):
            raise self._violation(f"the quorum could do without a part of it: {effect}")
        if not is_home or (member.usual_s or math.inf) * effect.count > self._run_s + 1e-9:
            raise self._violation(f"{home} is at home, and {member.usual_s} s usual: {effect}")
        if effect.step in self._single:
            raise self._violation(f"a run of this step crashed or failed: {effect}")

    def _post_of(self, worker: int, task: Task, after_s: float, event: Event) -> None:
        """Let a worker report later, if it is alive and computing the same thing then."""
        member = self._workers[worker]
        if after_s < math.inf:
            self._post(
                self.now + after_s,
                event,
                lambda: self._workers.get(worker) is member and member.task is task,
            )

    def _begin(self, effect: Compute) -> None:
        if not self._may_begin():
            raise self._violation(f"steps {sorted(self._open)} are open, and then {effect}")
        waiting = (t for t in itertools.count() if t not in self._closed and t not in self._open)
        first = next(waiting)
        if effect.step in self._closed or effect.step >= self.steps:
            raise self._violation(f"there is no such step any more: {effect}")
        if not first <= effect.step < first + self._lookahead:
            raise self._violation(f"step {first} is the next, and then {effect}")
        if effect.step != first and not self._home_shards(
            self._rank_of(effect.worker), effect.step
        ):
            raise self._violation(f"step {first} is before one that is at home elsewhere: {effect}")
        self._open[effect.step] = OpenStep(self._events, self.now)

    def _cancel(self, effect: Cancel) -> None:
        task = self._workers[effect.worker].task
        assert task is not None
        event = Cancelled(effect.worker, effect.step, task.shards[0])
        self._post_of(effect.worker, task, self._leaves_off_s, event)

    def _result(self, effect: Keep | Discard, shard: int) -> tuple[Results, Task]:
        results = self._results.get(effect.worker)
        task = results and results.pending.pop((effect.step, shard), None)
        if results is None or task is None:
            raise self._violation(f"there is no such result: {effect}")
        return results, task

    def _replace(self, effect: Replace) -> None:
        worker = effect.worker
        member = self._workers.get(worker)
        if member is None or member.task is None or member.is_replaced:
            raise self._violation(f"worker {worker} is ended or owes no answer: {effect}")
        if self.now < self._silent_at(member):
            raise self._violation(f"worker {worker} has time left: {effect}")
        member.is_replaced = True
        self.replaced.append(worker)
        left = Left(worker, effect.reason, crashed=True, results_stay=self._results_stay)
        self._post(self.now + self._end_s, left, lambda: self._workers.get(worker) is member)

    def _apply(self, effect: Apply) -> None:
        step = effect.step
        if self._applying is not None or step not in self._open:
            raise self._violation(f"steps {sorted(self._open)} are open, and then {effect}")
        if not self.rule.by_shard and step != self.applied:
            raise self._violation(f"step {self.applied} is the next, and then {effect}")
        self._check_idle()  # whoever can go on does so before the update
        oldest = min(self._versions(step))
        for other in self._open:
            if self._is_ready(other) and min(self._versions(other)) < oldest:
                raise self._violation(f"step {other} is ready and older: {effect}")
        parts = []
        for worker in effect.holders:
            results = self._results.get(worker)
            if results is None or step not in results.sums:
                raise self._violation(f"worker {worker} holds nothing: {effect}")
            parts += results.sums[step].parts.items()
        everyone = {w for w, results in self._results.items() if step in results.sums}
        if everyone != set(effect.holders):
            raise self._violation(f"workers {sorted(everyone)} hold sums, but {effect}")
        shards, kept = self.shards_of(step), self._kept(step)
        needed = self.rule.needed(shards)
        if len(kept) != needed or effect.shards != tuple(sorted(kept)):
            raise self._violation(f"{needed} are needed, {sorted(kept)} are kept at {effect}")
        stale = max(self.applied - version for version in self._versions(step, running=False))
        if stale > self.rule.staleness or effect.staleness != stale:
            raise self._violation(f"it is {stale} updates old: {effect}")
        total = tree_sum(parts, shards, add, present=needed)
        if total != whole_sum(step, shards, kept):
            raise self._violation(f"the sum of step {step} is {total}")
        applying = (effect, total)
        self._applying = applying
        self._post(self.now + self._apply_s, Applied(step), lambda: self._applying is applying)
