"""A run without torch, threads or waiting: a Coordinator drives workers that only pretend.

The simulation carries out effects as ``quorate.drive`` and a transport do, on a virtual clock, so a
thousand workers and hours of stragglers take seconds. A shard's result is a string and adding is
"(left+right)", which is not associative: a sum shows the exact order in which it was added.

    run = Simulation(shards=4, steps=10, time_s=lambda worker, step, shard: 1.0 + worker)
    run.at(0.0, Joined(0), Joined(1))
    run.at(3.5, Left(1, "killed"))  # or with results_stay=True, and what it held counts
    run.at(7.0, Joined(1))
    run.run()
    assert run.finish == Finish(10, "all steps are done")

After every event it is checked that

- a busy worker gets no shard, and nobody gets one of another step or one that is kept already;
- a shard has at most two copies running, and a second only when no shard waits for its first;
- no worker is idle while it may compute a shard that is in nobody's hands;
- every result is either kept or discarded, at once;
- at an update, each shard is kept by exactly one worker whose results are still there, and the sum
  is the string of the whole tree: it does not show who computed what;
- every step is applied exactly once, and in order;
- a worker is replaced once, on a tick, and after the timeout and 3 times its usual time; nobody who
  is due for it is forgotten;
- a run is aborted only over a shard that failed as often as is allowed, or on everyone, and then it
  is.

Whatever breaks one of these raises ``InvariantError`` with the last events and effects.

Legend: V shards of a step, N workers, t step, s shard, w worker. Times are virtual seconds.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

from quorate.coordinator import (
    Abort,
    Applied,
    Apply,
    Compute,
    Coordinator,
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
from quorate.rules import Sync
from quorate.tree import TreeSum, tree_sum


class InvariantError(AssertionError):
    """Something that must never happen did, or the run waits for an event that will not come."""


def leaf(step: int, shard: int) -> str:
    """What shard s of step t yields, whoever computes it."""
    return f"{step}.{shard}"


def add(left: str, right: str) -> str:
    """An addition that is not associative, so that its order shows."""
    return f"({left}+{right})"


def whole_sum(step: int, shards: int) -> str:
    """The sum of a step, straight from the definition of the tree and not by ``TreeSum``."""

    def node(level: int, index: int) -> str:
        if level == 0:
            return leaf(step, index)
        left = node(level - 1, 2 * index)
        if (2 * index + 1) << (level - 1) >= shards:
            return left
        return add(left, node(level - 1, 2 * index + 1))

    return node((shards - 1).bit_length(), 0)


def one_second(worker: int, step: int, shard: int) -> float:
    """Every shard takes a second."""
    return 1.0


def never(worker: int, step: int, shard: int) -> bool:
    """No shard fails."""
    return False


@dataclass(eq=False)
class _Worker:
    """One life of a worker."""

    task: tuple[int, int] | None = None  # (step, shard)
    since: float = 0.0
    times_s: list[float] = field(default_factory=list)  # of the shards that it has done
    is_replaced: bool = False


@dataclass
class _Results:
    """What a worker has computed: it outlives the worker that leaves with ``results_stay``."""

    pending: dict[tuple[int, int], str] = field(default_factory=dict)  # neither kept nor discarded
    sums: dict[int, TreeSum[str]] = field(default_factory=dict)  # per step, what was kept


@dataclass(order=True)
class _Due:
    """An event to come, which is void once ``still`` says no: its sender has left."""

    at: float
    order: tuple[int, int]
    event: Event = field(compare=False)
    still: Callable[[], bool] = field(compare=False)


class Simulation:
    """A coordinator and the workers that its script lets come and go.

    Args:
        shards: V, of every step or as a function of the step.
        steps: updates applied at the end.
        first_step: updates applied before.
        time_s: how long worker w takes for shard s of step t; infinite: it hangs until killed.
        fails: whether user code raises there, at the end of that time.
        apply_s: how long an update takes. At 0 nothing comes between ``Apply`` and ``Applied``, as
            in ``drive``; else workers may come, go and report meanwhile.
        patience: see ``Coordinator``.
        attempts: see ``Coordinator``.
        timeout_s: see ``Coordinator``.
        end_s: how long it takes to end a worker that is replaced. It may report meanwhile.
        start_s: how long it takes after that until it has joined again.
        results_stay: whether its results outlive it.
    """

    def __init__(
        self,
        *,
        shards: int | Callable[[int], int],
        steps: int,
        first_step: int = 0,
        time_s: Callable[[int, int, int], float] = one_second,
        fails: Callable[[int, int, int], bool] = never,
        apply_s: float = 0.0,
        patience: float = 1.5,
        attempts: int = 2,
        timeout_s: float | None = None,
        end_s: float = 0.0,
        start_s: float = 1.0,
        results_stay: bool = False,
    ) -> None:
        self.shards_of = shards if callable(shards) else lambda step: shards
        self.step = first_step
        self.steps = steps
        self.now = 0.0
        self.sums: list[str] = []  # of the steps applied
        self.applied_at: list[float] = []
        self.computed: Counter[int] = Counter()  # worker -> results of its that were kept
        self.copies = 0  # shards that were dealt while another worker was computing them
        self.replaced: list[int] = []  # workers
        self.finish: Finish | None = None
        self.abort: Abort | None = None
        self.log: deque[tuple[float, Event, Sequence[Effect]]] = deque(maxlen=50)
        self._coordinator = Coordinator(
            shards_of=self.shards_of,
            first_step=first_step,
            last_step=steps,
            rule=Sync(),
            patience=patience,
            attempts=attempts,
            timeout_s=timeout_s,
        )
        self._attempts, self._timeout_s = attempts, timeout_s
        self._end_s, self._start_s, self._results_stay = end_s, start_s, results_stay
        self._time_s, self._fails, self._apply_s = time_s, fails, apply_s
        self._queue: list[_Due] = []
        self._count = itertools.count()
        self._wake_at: float | None = None
        self._workers: dict[int, _Worker] = {}
        self._results: dict[int, _Results] = {}  # of workers who are or were there
        self._applying: tuple[Apply, str] | None = None  # and the sum that was collected for it
        self._kept_now: set[int] | None = None  # until the sums change
        self._failed_on: dict[int, list[int]] = {}  # shard of this step -> workers

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
        self._happen(event)
        effects = self._coordinator.handle(event, self.now)
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
        if isinstance(event, Left | Applied):
            self._kept_now = None
        match event:
            case Joined(worker):
                self._workers[worker] = _Worker()
                self._results.setdefault(worker, _Results())
            case Left(worker):
                member = self._workers.pop(worker)
                if not event.results_stay:
                    del self._results[worker]
                    if self._applying is not None and worker in self._applying[0].holders:
                        self._applying = None
                if event.crashed and member.task is not None:
                    self._note_failure(worker, *member.task)
                if member.is_replaced:
                    back = Joined(worker)
                    self._post(self.now + self._start_s, back, lambda: self._is_possible(back))
            case Done(worker, step, shard):
                member = self._workers[worker]
                member.task = None
                member.times_s.append(self.now - member.since)
                self._results[worker].pending[step, shard] = leaf(step, shard)
            case Failed(worker, step, shard):
                self._workers[worker].task = None
                self._note_failure(worker, step, shard)
            case Applied():
                assert self._applying is not None
                self.sums.append(self._applying[1])
                self.applied_at.append(self.now)
                self._applying = None
                for results in self._results.values():
                    results.sums.pop(self.step, None)
                self.step += 1
                self._failed_on = {}

    def _note_failure(self, worker: int, step: int, shard: int) -> None:
        if step == self.step and self._applying is None and shard not in self._kept():
            self._failed_on.setdefault(shard, []).append(worker)

    # --- effects ----------------------------------------------------------------------------------

    def _carry_out(self, effect: Effect, event: Event) -> None:
        if self.finish is not None or self.abort is not None:
            raise self._violation(f"the run is over, and then {effect}")
        match effect:
            case Compute():
                self._compute(effect)
            case Keep(worker, step, shard):
                if step != self.step or shard in self._kept():
                    raise self._violation(f"nobody needs this result any more: {effect}")
                value = self._result(effect)
                tree = self._results[worker].sums.setdefault(
                    step, TreeSum(self.shards_of(step), add)
                )
                tree.put((0, shard), value)
                self._kept_now = None
                self.computed[worker] += 1
            case Discard():
                self._result(effect)
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
            case Abort(_, _, shard):
                failed_on = self._failed_on.get(shard, [])
                if len(failed_on) < self._attempts and not self._workers.keys() <= set(failed_on):
                    raise self._violation(f"someone could try shard {shard} again: {effect}")
                self.abort = effect
            case Finish():
                if effect.step != self.step:
                    raise self._violation(f"{self.step} updates are applied at {effect}")
                self.finish = effect

    def _compute(self, effect: Compute) -> None:
        worker, step, shard = effect.worker, effect.step, effect.shard
        member = self._workers.get(worker)
        if member is None or member.task is not None:
            raise self._violation(f"worker {worker} is not idle: {effect}")
        if step != self.step or shard not in range(self.shards_of(step)) or self._applying:
            raise self._violation(f"step {self.step} has no such shard to compute: {effect}")
        if shard in self._kept():
            raise self._violation(f"shard {shard} is kept already: {effect}")
        copies = sum(other.task == (step, shard) for other in self._workers.values())
        if copies > 1 or (copies and self._may_compute(worker, self._loose())):
            raise self._violation(f"{copies} copies of shard {shard} are running: {effect}")
        if not self._may_compute(worker, {shard}):
            raise self._violation(f"shard {shard} failed there and others could try: {effect}")
        self.copies += copies
        member.task, member.since = (step, shard), self.now
        time_s = self._time_s(worker, step, shard)
        ended = Failed if self._fails(worker, step, shard) else Done
        if time_s < math.inf:
            event = ended(worker, step, shard)
            self._post(self.now + time_s, event, lambda: self._workers.get(worker) is member)

    def _result(self, effect: Keep | Discard) -> str:
        results = self._results.get(effect.worker)
        value = results and results.pending.pop((effect.step, effect.shard), None)
        if value is None:
            raise self._violation(f"there is no such result: {effect}")
        return value

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

    def _silent_at(self, member: _Worker) -> float:
        """When a worker is to be replaced if it has not answered before."""
        if self._timeout_s is None or member.task is None or member.is_replaced:
            return math.inf
        usual_s = median(member.times_s[-15:]) if member.times_s else 0.0
        return member.since + max(self._timeout_s, 3 * usual_s)

    def _apply(self, effect: Apply) -> None:
        if effect.step != self.step or self._applying is not None:
            raise self._violation(f"step {self.step} is under way, and then {effect}")
        parts = []
        for worker in effect.holders:
            results = self._results.get(worker)
            if results is None or self.step not in results.sums:
                raise self._violation(f"worker {worker} holds nothing: {effect}")
            parts += results.sums[self.step].parts.items()
        everyone = {w for w, results in self._results.items() if self.step in results.sums}
        if everyone != set(effect.holders):
            raise self._violation(f"workers {sorted(everyone)} hold sums, but {effect}")
        shards = self.shards_of(self.step)
        if self._kept() != set(range(shards)):
            raise self._violation(f"only shards {sorted(self._kept())} are kept at {effect}")
        total = tree_sum(parts, shards, add)
        if total != whole_sum(self.step, shards):
            raise self._violation(f"the sum of step {self.step} is {total}")
        applying = (effect, total)
        self._applying = applying
        self._post(self.now + self._apply_s, Applied(self.step), lambda: self._applying is applying)

    # --- invariants -------------------------------------------------------------------------------

    def _kept(self) -> set[int]:
        """Shards of this step that are in sums which are still there."""
        if self._kept_now is None:
            self._kept_now = {
                shard
                for results in self._results.values()
                if (tree := results.sums.get(self.step)) is not None
                for level, index in tree.parts
                for shard in range(index << level, min((index + 1) << level, tree.leaves))
            }
        return self._kept_now

    def _loose(self) -> set[int]:
        """Shards of this step that nobody computes or holds."""
        tasks = [member.task for member in self._workers.values()]
        computing = {task[1] for task in tasks if task is not None and task[0] == self.step}
        return set(range(self.shards_of(self.step))) - self._kept() - computing

    def _may_compute(self, worker: int, shards: set[int]) -> bool:
        """Whether one of the shards has not failed on this worker, or has on every one."""
        failed_on = (set(self._failed_on.get(shard, ())) for shard in shards)
        return any(worker not in those or self._workers.keys() <= those for those in failed_on)

    def _check(self, event: Event) -> None:
        """What must hold when all effects of an event are carried out."""
        if isinstance(event, Done) and self._results[event.worker].pending:
            raise self._violation(f"neither kept nor discarded: the result of {event}")
        if self.finish is not None or self.abort is not None:
            return
        for shard, failed_on in self._failed_on.items():
            if len(set(failed_on)) >= self._attempts:
                raise self._violation(f"shard {shard} failed on {failed_on}, and nothing is done")
        silent_at = math.inf
        if self._timeout_s is not None:
            silent_at = min(map(self._silent_at, self._workers.values()), default=math.inf)
        # One that is due already must be looked at on the next tick, which has to come.
        if silent_at < math.inf and (
            self._wake_at is None or self._wake_at > max(silent_at, self.now)
        ):
            raise self._violation(f"no tick is asked for at {silent_at}, but at {self._wake_at}")
        if self._applying:
            return
        # To give one that is being ended another shard, or not to, are both fine.
        idle = [w for w, m in self._workers.items() if m.task is None and not m.is_replaced]
        if idle and (loose := self._loose()):
            for worker in idle:
                if self._may_compute(worker, loose):
                    raise self._violation(f"worker {worker} is idle, and nobody has {loose}")

    def _violation(self, message: str) -> InvariantError:
        lines = [f"  {at:g}: {event} -> {list(effects)}" for at, event, effects in self.log]
        return InvariantError("\n".join([f"{message} (step {self.step})", *lines]))
