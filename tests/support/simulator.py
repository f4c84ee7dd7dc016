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

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence

from support.event_queue import EventQueue
from support.run_books import OpenStep, Results, Task, Worker
from support.run_effects import Effects

from quorate.coordination import plan
from quorate.coordination.coordinator import Coordinator
from quorate.coordination.protocol import (
    Abort,
    Applied,
    Apply,
    Cancelled,
    Done,
    Effect,
    Event,
    Failed,
    Finish,
    Joined,
    Left,
    Stop,
    Tick,
)
from quorate.coordination.rules import Rule, Sync
from quorate.coordination.tally import Tally


def one_second(worker: int, step: int, shard: int) -> float:
    """Every shard takes a second."""
    return 1.0


def never(worker: int, step: int, shard: int) -> bool:
    """No shard fails."""
    return False


class Simulation(Effects):
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
        self._queue = EventQueue()
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
            self._queue.post(time_s, event, lambda event=event: self._is_possible(event))

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

    def _is_possible(self, event: Joined | Left | Stop) -> bool:
        if isinstance(event, Stop):
            return True
        return (event.worker in self._workers) == isinstance(event, Left)

    def _receive(self) -> Event:
        """The next event, or a tick where the coordinator asked to be woken before."""
        at = self._queue.next_at
        if self._wake_at is not None and not (at is not None and at <= self._wake_at):
            self.now = self._wake_at
            return Tick()
        if at is None:
            raise self._violation("the run is not over, and nothing will happen any more")
        self.now = at
        return self._queue.take()

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
                    self._queue.post(
                        self.now + self._start_s, back, lambda: self._is_possible(back)
                    )
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

    def _note_failure(self, worker: int, step: int, shard: int) -> None:
        if self._is_wanted(step, shard):
            self._open[step].failed_on.setdefault(shard, []).append(worker)

    def _note_run(self, task: Task) -> None:
        """Note that a run ended badly, unless nobody waits for any of it."""
        if len(task.shards) > 1 and any(self._is_wanted(task.step, s) for s in task.shards):
            self._single.add(task.step)
