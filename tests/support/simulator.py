"""A run without torch, threads or waiting: a Coordinator drives workers that only pretend.

The simulation carries out effects like ``quorate.training.drive`` and a transport, on a virtual
clock, so a thousand workers and hours of stragglers take seconds. A shard's result is a string and
adding is "(left+right)", without associativity: a sum shows the exact order of its additions.

    run = Simulation(shards=4, steps=10, time_s=lambda worker, step, shard: 1.0 + worker)
    run.at(0.0, Joined(0), Joined(1))
    run.at(3.5, Left(1, "killed"))  # or with results_stay=True, and the worker's results count
    run.at(7.0, Joined(1))
    run.run()
    assert run.finish == Finish(10, "all steps are done")

The simulation keeps separate books of open, kept, applied, late and stale results, and knows only
two facts of the rule: the number of shards of a step, and the allowed staleness. After every event
the simulation checks these conditions:

- nobody busy gets a shard, and nobody gets a kept shard, or a shard of a step not to be begun;
- a shard has at most two copies running, and a second only when there is nothing else to do;
- no worker is idle while a shard is needed and in nobody's hands, or a step may be begun;
- every result is kept or discarded at once, and discarded only if the result is too late;
- at an update, exactly the needed shards are kept, each by a worker whose results are there;
  none is staler than the rule allows; the sum is the tree's over just these shards;
- workers with shards of an applied step are told so at once, and nobody else is;
- every step is applied once; after a stop, started work is finished and nothing is begun;
- a worker is replaced once, on a tick, and not before its time;
- a run is aborted only over a shard that failed as often as is allowed, or on everyone.

Whatever breaks a condition raises ``InvariantError`` with the last events and effects.

Legend: V shards of a step, N workers, t step, s shard, w worker. Times are virtual seconds.
"""

import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from support.shown_sums import add, leaf, whole_sum

from quorate.coordination import plan, protocol
from quorate.coordination.coordinator import Coordinator
from quorate.coordination.rules import Rule, Sync
from quorate.coordination.tally import Tally
from quorate.coordination.tree import TreeSum, tree_sum
from quorate.simulation.event_queue import EventQueue


class InvariantError(AssertionError):
    """A condition does not hold, or the run waits for an event that will not come."""


@dataclass(eq=False)
class Task:
    """A run of shards computed by a worker, usually a single shard."""

    step: int
    shards: range
    version: int  # updates made at the beginning of the run
    since: float
    lost: set[int] = field(default_factory=set)  # shards: the worker was told, or came too late


@dataclass(eq=False)
class Worker:
    """A life of a worker."""

    place: str = ""
    task: Task | None = None
    is_replaced: bool = False


@dataclass
class Results:
    """Results of a worker: they outlive a worker that leaves with ``results_stay``."""

    pending: dict[tuple[int, int], Task] = field(default_factory=dict)  # nor kept nor discarded
    sums: dict[int, TreeSum[str]] = field(default_factory=dict)  # per step, the kept shards
    versions: dict[tuple[int, int], int] = field(default_factory=dict)  # of the kept shards


@dataclass
class OpenStep:
    """A begun step, not applied yet."""

    begun_at_event: int
    failed_on: dict[int, list[int]] = field(default_factory=dict)  # shard -> workers
    kept_now: set[int] | None = None  # shards, until the sums change


@dataclass(kw_only=True, eq=False)
class Simulation:
    """A coordinator and the workers, coming and going by the script."""

    shards: int | Callable[[int], int]  # V, of every step or as a function of the step
    steps: int  # updates applied at the end
    rule: Rule = field(default_factory=Sync)
    home_shards: Callable[[tuple[int, int], int], range] | None = None
    lookahead: int = 1
    most_open: float = math.inf
    first_step: int = 0  # updates applied before
    left_open: Iterable[int] = ()  # steps not among these updates, although later steps are
    tally: Tally | None = None  # of before
    patience: float = 1.5
    attempts: int = 2
    timeout_s: float | None = None
    run_s: float = 0.0
    time_s: Callable[[int, int, int], float] = lambda w, t, s: 1.0  # infinite: the worker hangs
    fails: Callable[[int, int, int], bool] = lambda w, t, s: False  # user code raises at the end
    leaves_off_s: float = math.inf  # to leave off an unwanted shard; infinite: the worker goes on
    # At 0 nothing comes between ``Apply`` and ``Applied``; else workers come, go, report meanwhile.
    apply_s: float = 0.0
    end_s: float = 0.0  # to end a replaced worker: reports are possible meanwhile
    start_s: float = 1.0  # after the end, until the worker has joined again
    results_stay: bool = False  # whether results of a replaced worker stay

    def __post_init__(self) -> None:
        v = self.shards
        self.shards_of = v if callable(v) else lambda step: v
        self.applied = self.first_step
        self.order: list[int] = []  # the steps applied
        self.sums: list[str] = []  # of each
        self.applied_at: list[float] = []
        self.staleness: list[int] = []  # of every gradient applied
        self.fates: dict[str, Counter[int]] = {  # of every shard: worker -> how many
            fate: Counter() for fate in ("fresh", "stale", "dropped", "copies")
        }
        self.computed: Counter[int] = Counter()  # worker -> kept results
        self.copies = 0  # shards dealt during the computation by another worker
        self.runs = 0  # dealt runs of several shards
        self.finish: protocol.Finish | None = None
        self.abort: protocol.Abort | None = None
        self.log: deque[tuple[float, protocol.Event, Sequence[protocol.Effect]]] = deque(maxlen=50)
        left_open = list(self.left_open)
        as_given = ("first_step", "rule", "home_shards", "lookahead", "most_open", "tally")
        as_given += ("patience", "attempts", "timeout_s", "run_s")
        self.coordinator = Coordinator(
            shards_of=self.shards_of,
            last_step=self.steps,
            left_open=left_open,
            **{name: getattr(self, name) for name in as_given},
        )
        self._homes = self.home_shards or (
            lambda rank_of, step: plan.home_shards(rank_of, self.shards_of(step))
        )
        self._queue: EventQueue[protocol.Event] = EventQueue()
        self._events = 0
        self._wake_at = math.inf
        self._workers: dict[int, Worker] = {}
        self._ranks: dict[int, int] = {}  # until somebody comes or goes
        self._results: dict[int, Results] = {}  # of workers who are or were there
        self._open: dict[int, OpenStep] = {}
        self._closed = set(range(self.first_step + len(left_open))) - {*left_open}  # applied
        self._end = self.steps  # updates applied at the end, stopped or not
        self._applying: tuple[protocol.Apply, str] | None = None  # and the collected sum
        self._to_tell: set[tuple[int, int, int]] = set()  # who computes (t, s) in vain

    @property
    def now(self) -> float:
        """The virtual time."""
        return self._queue.now

    # --- methods for tests ------------------------------------------------------------------------

    def at(self, time_s: float, *events: protocol.Joined | protocol.Left | protocol.Stop) -> None:
        """Script events for a time. At equal times, events come in the order of scripting.

        A worker cannot leave while its replacement starts, nor join after the replacement: void.
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

    def advance(self) -> Sequence[protocol.Effect]:
        """Let the next event happen, and return the effects of the event."""
        event = self._receive()
        self._events += 1
        self._happen(event)
        effects = self.coordinator.handle(event, self.now)
        self.log.append((self.now, event, effects))
        self._wake_at = math.inf
        for effect in effects:
            self._carry_out(effect, event)
        self._check(event)
        return effects

    # --- events -----------------------------------------------------------------------------------

    def _is_possible(self, event: protocol.Joined | protocol.Left | protocol.Stop) -> bool:
        if isinstance(event, protocol.Stop):
            return True
        return (event.worker in self._workers) == isinstance(event, protocol.Left)

    def _receive(self) -> protocol.Event:
        """The next event, or a tick where the coordinator asked to be woken before."""
        event = self._queue.next(self._wake_at)
        if event is None and self._wake_at == math.inf:
            raise self._violation("the run is not over, and nothing will happen any more")
        return event or protocol.Tick()

    def _happen(self, event: protocol.Event) -> None:
        """Carry out the event's meaning for the workers, before the coordinator sees the event."""
        match event:
            case protocol.Joined(worker):
                self._workers[worker] = Worker(event.place)
                self._ranks.clear()
                self._results.setdefault(worker, Results())
            case protocol.Left(worker):
                member = self._workers.pop(worker)
                self._ranks.clear()
                if not event.results_stay:
                    for number in self._results.pop(worker).sums:
                        self._open[number].kept_now = None
                    if self._applying is not None and worker in self._applying[0].holders:
                        self._applying = None
                task = member.task
                if event.crashed and task is not None and len(task.shards) == 1:
                    self._note_failure(worker, task.step, task.shards[0])
                if member.is_replaced:
                    back = protocol.Joined(worker, member.place)
                    self._queue.post(self.now + self.start_s, back, lambda: self._is_possible(back))
            case protocol.Done(worker, step):
                task = self._end_task(worker)
                for shard in task.shards:
                    self._results[worker].pending[step, shard] = task
            case protocol.Failed(worker, step, shard):
                self._end_task(worker)
                self._note_failure(worker, step, shard)
            case protocol.Cancelled(worker):
                self._end_task(worker)
            case protocol.Applied(step):
                self._end_step(step)
            case protocol.Stop():
                # A step without computed or held shards is not under way any more.
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

    # --- effects: each is carried out if allowed --------------------------------------------------

    def _carry_out(self, effect: protocol.Effect, event: protocol.Event) -> None:
        if self.finish is not None or self.abort is not None:
            raise self._violation(f"the run is over, and then {effect}")
        match effect:
            case protocol.Compute():
                self._compute(effect)
            case protocol.Keep(worker, step, first, count):
                for shard in range(first, first + count):
                    if not self._is_wanted(step, shard):
                        raise self._violation(f"nobody needs this result any more: {effect}")
                    results, task = self._result(effect, shard)
                    tree = results.sums.setdefault(step, TreeSum(self.shards_of(step), add))
                    tree.put((0, shard), leaf(step, shard))
                    results.versions[step, shard] = task.version
                    self._open[step].kept_now = None
                    self.computed[worker] += 1
            case protocol.Discard(worker, step, first, count):
                kept = self._kept(step) if step in self._open else set()
                for shard in range(first, first + count):
                    if self._is_wanted(step, shard) or not self.rule.copies:
                        raise self._violation(f"it was not in vain: {effect}")
                    _, task = self._result(effect, shard)
                    self._lose(worker, task, shard, kept)
            case protocol.Cancel(worker, step, shard):
                if (worker, step, shard) not in self._to_tell or not self.rule.copies:
                    raise self._violation(f"it is not in vain: {effect}")
                self._to_tell.remove((worker, step, shard))
                self._cancel(effect)
            case protocol.Apply():
                self._apply(effect)
            case protocol.Replace(worker):
                if not isinstance(event, protocol.Tick):
                    raise self._violation(f"a result may be under way, and yet {effect}")
                self._replace(effect)
            case protocol.Wake(at):
                # At once is allowed, but not after a tick: the run would never end.
                if at < self.now or (at == self.now and isinstance(event, protocol.Tick)):
                    raise self._violation(f"at {self.now} the coordinator asks for {effect}")
                if self._wake_at < math.inf:
                    raise self._violation(f"the coordinator asks for two ticks: {effect}")
                self._wake_at = at
            case protocol.Abort(_, step, shard):
                failed_on = self._open[step].failed_on.get(shard, []) if step in self._open else []
                if len(failed_on) < self.attempts and not self._workers.keys() <= set(failed_on):
                    raise self._violation(f"someone could try shard {shard} again: {effect}")
                self.abort = effect
            case protocol.Finish(step):
                if step != self.applied or step != self._end:
                    raise self._violation(f"it is not {self._end} updates at {effect}")
                self.finish = effect

    def _compute(self, effect: protocol.Compute) -> None:
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
            if not self._may_compute(worker, number, {shard}):
                raise self._violation(f"shard {shard} failed there and others could try: {effect}")
            if runners and effect.count > 1:
                raise self._violation(f"shard {shard} is a copy, and copies come alone: {effect}")
            self.copies += len(runners)
        self.runs += effect.count > 1
        task = member.task = Task(number, shards, self.applied, self.now)
        time_s = 0.0
        for shard in shards:
            time_s += self.time_s(worker, number, shard)
            if self.fails(worker, number, shard):
                self._post_of(worker, task, time_s, protocol.Failed(worker, number, shard))
                return
        self._post_of(worker, task, time_s, protocol.Done(worker, number, effect.shard))

    def _post_of(self, worker: int, task: Task, after_s: float, event: protocol.Event) -> None:
        """Let a worker report later, if it is then alive and computing the same task."""
        member = self._workers[worker]
        if after_s < math.inf:
            self._queue.post(
                self.now + after_s,
                event,
                lambda: self._workers.get(worker) is member and member.task is task,
            )

    def _begin(self, effect: protocol.Compute) -> None:
        if not self._may_begin():
            raise self._violation(f"steps {sorted(self._open)} are open, and then {effect}")
        waiting = (t for t in itertools.count() if t not in self._closed and t not in self._open)
        first = next(waiting)
        if effect.step in self._closed or effect.step >= self.steps:
            raise self._violation(f"there is no such step any more: {effect}")
        if not first <= effect.step < first + self.lookahead:
            raise self._violation(f"step {first} is the next, and then {effect}")
        if effect.step != first and not self._homes(self._rank_of(effect.worker), effect.step):
            raise self._violation(f"step {first} is before one that is at home elsewhere: {effect}")
        self._open[effect.step] = OpenStep(self._events)

    def _cancel(self, effect: protocol.Cancel) -> None:
        task = self._workers[effect.worker].task
        assert task is not None
        event = protocol.Cancelled(effect.worker, effect.step, task.shards[0])
        self._post_of(effect.worker, task, self.leaves_off_s, event)

    def _result(self, effect: protocol.Keep | protocol.Discard, shard: int) -> tuple[Results, Task]:
        results = self._results.get(effect.worker)
        task = results and results.pending.pop((effect.step, shard), None)
        if results is None or task is None:
            raise self._violation(f"there is no such result: {effect}")
        return results, task

    def _replace(self, effect: protocol.Replace) -> None:
        worker = effect.worker
        member = self._workers.get(worker)
        if member is None or member.task is None or member.is_replaced:
            raise self._violation(f"worker {worker} is ended or owes no answer: {effect}")
        if self.timeout_s is None or self.now < member.task.since + self.timeout_s:
            raise self._violation(f"worker {worker} has time left: {effect}")
        member.is_replaced = True
        left = protocol.Left(worker, effect.reason, crashed=True, results_stay=self.results_stay)
        self._queue.post(self.now + self.end_s, left, lambda: self._workers.get(worker) is member)

    def _apply(self, effect: protocol.Apply) -> None:
        step = effect.step
        if self._applying is not None or step not in self._open:
            raise self._violation(f"steps {sorted(self._open)} are open, and then {effect}")
        if not self.rule.by_shard and step != self.applied:
            raise self._violation(f"step {self.applied} is the next, and then {effect}")
        self._check_idle()  # all workers go on before the update if possible
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
        stale = max(self.applied - version for version in self._versions(step))
        if stale > self.rule.staleness or effect.staleness != stale:
            raise self._violation(f"it is {stale} updates old: {effect}")
        total = tree_sum(parts, shards, add, present=needed)
        if total != whole_sum(step, shards, kept):
            raise self._violation(f"the sum of step {step} is {total}")
        applying = (effect, total)
        self._applying = applying
        # An update in no time ends before anything else happens at the same time.
        self._queue.post(
            self.now + self.apply_s,
            protocol.Applied(step),
            lambda: self._applying is applying,
            is_first=True,
        )

    def _lose(self, worker: int, task: Task, shard: int, kept: set[int]) -> None:
        if shard not in task.lost:
            task.lost.add(shard)
            self.fates["copies" if shard in kept else "dropped"][worker] += 1

    # --- the judge: the conditions after every event ----------------------------------------------

    def _check(self, event: protocol.Event) -> None:
        """Check the conditions after all effects of an event are carried out."""
        if isinstance(event, protocol.Done) and self._results[event.worker].pending:
            raise self._violation(f"neither kept nor discarded: the result of {event}")
        if self._to_tell:
            raise self._violation(f"these compute in vain, untold: {sorted(self._to_tell)}")
        if self.finish is not None or self.abort is not None:
            return
        for number, step in self._open.items():
            for shard, failed_on in step.failed_on.items():
                if len(set(failed_on)) >= self.attempts:
                    raise self._violation(f"shard {shard} of {number} failed on {failed_on}")
        if self._applying:
            return
        self._check_idle()

    def _check_idle(self) -> None:
        # A worker being ended may get another shard or none: both are fine.
        idle = [w for w, m in self._workers.items() if m.task is None and not m.is_replaced]
        if idle and (idle := self._have_work(idle)):
            loose = {step: self._loose(step) for step in self._open}
            raise self._violation(f"workers {idle} are idle, and nobody has {loose}")

    # --- the books: the consequences of events ----------------------------------------------------

    def _rank_of(self, worker: int) -> tuple[int, int]:
        if not self._ranks:
            # By place: the largest first, and the coordinator's own last.
            places = {w: member.place for w, member in self._workers.items()}
            sizes = Counter(places.values())
            order = sorted(places, key=lambda w: (not places[w], -sizes[places[w]], places[w], w))
            self._ranks = {w: rank for rank, w in enumerate(order)}
        return self._ranks[worker], len(self._workers)

    def _kept(self, step: int) -> set[int]:
        """Return the shards of an open step in sums that are still there."""
        found = self._open[step]
        if found.kept_now is None:
            found.kept_now = {
                shard
                for results in self._results.values()
                if (tree := results.sums.get(step)) is not None
                for level, index in tree.parts
                for shard in range(index << level, min((index + 1) << level, tree.leaves))
            }
        return found.kept_now

    def _is_wanted(self, step: int, shard: int) -> bool:
        """Return whether a result may still be in the update of its step."""
        applying = self._applying is not None and self._applying[0].step == step
        return step in self._open and not applying and shard not in self._kept(step)

    def _running(self, step: int) -> dict[int, list[int]]:
        """Return the workers that compute the shards of a step not held by anybody."""
        running: dict[int, list[int]] = {}
        kept = self._kept(step)
        for worker, member in self._workers.items():
            task = member.task
            if task is not None and task.step == step:
                for shard in set(task.shards) - kept:
                    running.setdefault(shard, []).append(worker)
        return running

    def _versions(self, step: int) -> list[int]:
        """Return the versions of parameters behind the kept gradients of an open step."""
        return [
            version
            for results in self._results.values()
            if step in results.sums
            for (number, _), version in results.versions.items()
            if number == step
        ]

    def _loose(self, step: int) -> set[int]:
        """Return the shards of a step that nobody computes or holds."""
        return set(range(self.shards_of(step))) - self._kept(step) - self._running(step).keys()

    def _may_compute(self, worker: int, step: int, shards: set[int]) -> bool:
        """Return whether a shard has not failed on this worker, or has failed on every worker."""
        failures = self._open[step].failed_on
        failed_on = (set(failures.get(shard, ())) for shard in shards)
        return any(worker not in those or self._workers.keys() <= those for those in failed_on)

    def _may_begin(self) -> bool:
        """Return whether the rule allows another begun step: alone, nobody works ahead."""
        alone = len(self._workers) < 2
        most = 1 if alone else min(self.rule.staleness + 1, self.most_open)
        return len(self._open) < most and self.applied + len(self._open) < self._end

    def _wants(self, step: int) -> int:
        """Return the least number of shards of a step that somebody should begin.

        At its opening all shards, because nobody knows yet who will be late.
        """
        if self._open[step].begun_at_event == self._events:
            return self.shards_of(step)
        needed = self.rule.needed(self.shards_of(step))
        return needed - len(self._kept(step)) - len(self._running(step))

    def _have_work(self, workers: Iterable[int]) -> list[int]:
        """Return the workers that may begin a step, or compute a needed and uncomputed shard."""
        if self._may_begin():
            return list(workers)
        loose = {step: self._loose(step) for step in self._open if self._wants(step) > 0}
        return [w for w in workers if any(self._may_compute(w, *each) for each in loose.items())]

    def _violation(self, message: str) -> InvariantError:
        lines = [f"  {at:g}: {event} -> {list(effects)}" for at, event, effects in self.log]
        return InvariantError("\n".join([f"{message} (after {self.applied} updates)", *lines]))
