"""The training loop: makes the updates decided by the coordinator, and reports each update.

An update passes through seven files in this order; ``grep -n "def NAME" FILE`` finds each place:

    training/drive.py              drive: carries out the coordinator's effects in order
    coordination/coordinator.py    handle: turns an event into effects, such as "compute shard 3"
    engines/job_channel.py         send: passes shards to workers, and receives the results
    engines/shard_runner.py        run: computes the shards of a worker, in its thread or process
    engines/job.py                 compute_run: fetches the rows of a shard and the parameters
    replica/replica.py             gradient: forward and backward pass of a shard
    training/optimizing/update.py  apply: sum, mean, clipping, optimizer step, average, schedule

Afterwards ``Updates.reports`` in this file reports the update.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from quorate.coordination.coordinator import Coordinator
from quorate.coordination.plan import Plan
from quorate.coordination.protocol import Stop
from quorate.coordination.run_event import NOTE, RunEvent
from quorate.data.source import Source
from quorate.engines import Transport
from quorate.engines.drawing import drawing
from quorate.engines.spot_check import SpotChecks, ask_workers
from quorate.machine.limits import SPOT_CHECK_S
from quorate.replica.totals import Totals, joined
from quorate.services.report import Report
from quorate.training.drive import Ready, drive
from quorate.training.not_finite_shard import not_made
from quorate.training.observer import observed
from quorate.training.optimizing.step_again import StepAgain, step_again
from quorate.training.optimizing.update import Applied
from quorate.training.serving.turns import Turns, turns_of
from quorate.training.speed_meter import SpeedMeter
from quorate.training.state import State
from quorate.training.stop import Stops
from quorate.training.whole_batch.whole_batch import WholeBatch, kind_of_training, whole_batch
from quorate.training.worker_group import WorkerGroup

RUN_S = 4e-3  # seconds of shards dealt at once: about fifty times the cost of dealing a shard
WHOLE_S = 1e6  # the same for shards that flow through stages: all shards of a worker
_NOTHING = nullcontext()


class Loop(NamedTuple):
    """A prepared training loop."""

    state: State
    plan: Plan
    last_step: int
    saved: tuple[int, Path] | None  # the newest checkpoint: its step and directory
    transport: Transport | None  # None: there is nothing to do
    reports: Iterator[Report]


@contextmanager
def looping(
    loop: Loop,
    workers: WorkerGroup,
    source: Source,
    *,
    facts: Mapping[str, Any],
    stops: Stops,
    say: Callable[[str], None],
) -> Iterator[Loop]:
    """Start the workers of a loop with updates to make, and end the workers afterwards.

    Args:
        facts: facts about the run, as saved in a checkpoint.
        stops: requests to end the loop.
        say: shows a line to the user.
    """
    state, plan = loop.state, loop.plan
    edits = state.model_edits
    edits.detect()  # since the last loop
    edits.raise_if_unsupported()
    with ExitStack() as stack:
        stack.callback(state.end_parts)
        own = workers.new_transport(state, source, say)
        known = {**facts, "pipeline": workers.replicas.pipeline}
        transport = stack.enter_context(closing(observed(own, state, known)))
        # An observer of the loop, or another route to its workers, makes comparisons of its own.
        ask = partial(ask_workers, transport, len(workers.groups))
        checks = workers.spot_checks(state, source, ask) if transport is own else None
        job = kind_of_training(workers)(
            source,
            state.parameters,
            range(min([state.global_step, *state.left_open]), loop.last_step),
            on_snapshots=workers.on_snapshots,
            loader_workers=workers.config.loading.processes,
            threads=workers.config.workers.threads,
        )
        again = step_again(
            transport,
            source,
            state.optimizer,
            workers.rule,
            threads=workers.config.workers.threads,
            timeout_s=workers.timeout_s if transport.can_replace else None,
            say=say,
        )
        if again is None and state.optimizer.takes_closure:
            workers.replicas.notes.add(
                f"{state.phases.kind}.step() accepts a closure and receives none under "
                f"{workers.rule.name}, because workers compute while the optimizer steps"
            )
        whole = whole_batch(workers, state, transport, source, say)
        turns = turns_of(state, own)
        if turns is not None:
            stack.enter_context(closing(turns))
        channel = stack.enter_context(closing(transport.open(job)))
        edits.set_baseline()
        stack.enter_context(stops.telling(lambda reason: channel.post(Stop(reason))))
        between = workers.replicas.between(state)
        coordinator = Coordinator(
            shards_of=plan.shards_of,
            home_shards=plan.home_shards,
            next_home=plan.next_home,
            lookahead=plan.lookahead,
            first_step=state.global_step,
            last_step=loop.last_step,
            left_open=state.left_open,
            tally=state.tally,
            rule=workers.rule,
            most_open=workers.most_open,
            timeout_s=workers.timeout_s if transport.can_replace else None,
            run_s=_run_s(workers) if transport.takes_runs else 0.0,
        )
        rests = between.begin, between.end
        updates = Updates(
            *(state, source, workers, loop.last_step, say, rests, checks),
            again=again if whole is None else None,
            turns=turns,
            whole_batch=whole,
        )
        apply = updates.applying()
        told: Any = {"stopping": lambda: stops.reason, "begun": stops.begin}
        copied = workers.stragglers.copied_shards
        made = drive(coordinator, channel, apply, say=say, copied_shards=copied, **told)
        with closing(updates.reports(made, coordinator)) as reports:
            yield loop._replace(transport=transport, reports=reports)


def _run_s(workers: WorkerGroup) -> float:
    return WHOLE_S if workers.replicas.are_in_stages else RUN_S


class Progress(Protocol):
    """The progress of a loop, reported by the maker of the updates."""

    first_step: int  # number of updates applied before
    begun_at: float | None  # time.monotonic() at the first dealt shard, if known
    reason: str  # why the loop ended where it ended


class Updates(NamedTuple):
    """The updates of a loop, from the present state to ``last_step``.

    Between two updates, parameters rest: see ``Between``.
    """

    state: State
    source: Source
    workers: WorkerGroup
    last_step: int
    say: Callable[[str], None]
    rests: tuple[Callable[[], None], Callable[[], None]]  # called where a rest begins and ends
    spot_checks: SpotChecks | None = None
    again: StepAgain | None = None
    turns: Turns | None = None  # if servers have the state
    whole_batch: WholeBatch | None = None  # if the loss is over all rows of a batch

    def applying(self) -> Callable[[Ready], tuple[Ready, Applied]]:
        """Return the function that makes the update of a step."""
        state, plan = self.state, self.source.plan

        def apply(ready: Ready) -> tuple[Ready, Applied]:
            _, end_rest = self.rests
            end_rest()
            leaves = plan.shards_of(ready.step)
            again = None if self.again is None else partial(self.again, ready.step)
            state.begin_phase(plan.phase(ready.step))
            present = len(ready.shards)
            update = partial(state.update.apply, leaves=leaves, present=present, again=again)
            whole = self.whole_batch
            with drawing("update", plan, state.global_step + 1):
                applied = update(ready.parts) if whole is None else whole(ready, update)
            self.took(ready, applied)
            if self.turns is not None:
                self.turns.updated()
            return ready, applied

        return apply

    def took(self, ready: Ready, applied: Applied) -> None:
        """Record an update in the state.

        Raises:
            NotFiniteError: the update was not made, and the run must stop.
        """
        state = self.state
        if applied.not_finite is not None:
            make_replica = partial(self.workers.probe_replica, state)
            state.bring_home()
            not_made(ready.step, applied, state, self.source, make_replica, self.say)
        state.count_update(ready.step)

    def reports(
        self, made: Iterator[tuple[Ready, Applied]], progress: Progress
    ) -> Generator[Report]:
        """Yield a report of each update.

        Args:
            made: the updates, already applied to the state.
            progress: progress of the loop.

        Raises:
            NotFiniteError: a loss or gradient was not finite; that update was not made.
        """
        state, plan = self.state, self.source.plan
        state.tally.include(len(self.workers.groups) - 1)
        self._take_changes()  # made by callbacks when training started
        pace = SpeedMeter()
        begun = time.monotonic()
        named: frozenset[str] = frozenset()
        state.model_edits.detect_draws(first=True)
        for ready, applied in made:
            step, n = ready.step, state.global_step
            checked_s = self._spot_check(n, time.monotonic() - begun)
            rows = batch_rows = plan.batch_rows(step)
            if len(ready.shards) < plan.shards_of(step):
                rows = sum(len(plan.shard(step, shard)) for shard in ready.shards)
            dropped_rows = batch_rows - rows
            state.dropped_rows += dropped_rows
            for remark in applied.remarks:
                self.workers.replicas.notes.add(remark)
            for question in applied.questions:
                self.workers.replicas.notes.question_values(question)
            self.workers.replicas.tell(self.say)
            switched_off = state.model_edits.model_changes.switched_off
            if new := applied.missing - named - switched_off:
                named |= new
                self.say(f"no gradient in step {step}, so unchanged: {', '.join(sorted(new))}")
            if n == progress.first_step + 1:
                begun = progress.begun_at or begun  # excludes the start of the workers
            if n == progress.first_step + 2:
                pace.forget()  # excludes warm-up
            pace.add(time.monotonic() - begun - checked_s, rows)
            ends_epoch = n % plan.steps_per_epoch == 0
            epoch = plan.epoch(n - 1)  # the epoch of this shard follows from the updates before
            if ends_epoch and state.dropped_rows:
                of = f"{state.dropped_rows:,} of {plan.dealt_rows:,} rows"
                self.say(RunEvent(f"epoch {epoch + 1}: {of} were dropped", NOTE))
                state.dropped_rows = 0
            counts = state.tally.to_json()
            report = Report(
                global_step=n,
                epoch=epoch,
                rows=rows,
                dropped_rows=dropped_rows,
                weight=applied.weight,
                metrics=_named(applied, self.workers.replicas.totals, phase := plan.phase(step)),
                worker_losses=applied.worker_losses(),
                staleness=ready.staleness,
                fresh=counts["fresh"],
                stale=counts["stale"],
                dropped=counts["dropped"],
                not_finite=state.not_finite,
                lr=applied.lr,
                grad_norm=applied.grad_norm,
                examples_per_s=pace.examples_per_s,
                last_step=self.last_step,
                epochs=-(-self.last_step // plan.steps_per_epoch),
                ends_epoch=ends_epoch,
                eta_s=pace.eta_s(self.last_step - n),
                doubts=self.workers.replicas.notes.take_doubts(),
                totals=applied.totals,
                phase=phase,
            )
            with self._looking(), drawing("between", plan, n):
                yield report
            self._take_changes()
            state.model_edits.detect_draws()
            begun = time.monotonic()  # excludes the caller's time on a report
        self.workers.replicas.tell(self.say)
        if not self.workers.keeps_bits(plan.shards):
            self.say(RunEvent(state.tally.summary(), NOTE))
        elif doubts := self.workers.replicas.notes.doubts:  # doubts may have been shown long ago
            reasons = "1 reason" if len(doubts) == 1 else f"{len(doubts)} reasons, the first"
            self.say(f"the weights may have different bits in another run ({reasons}): {doubts[0]}")
        if state.global_step < self.last_step:
            stopped = f"stopped after step {state.global_step:,}: {progress.reason}"
            self.say(RunEvent(stopped, NOTE))

    def _take_changes(self) -> None:
        """Record the changes that user code made to the model, before the next shard is dealt."""
        self.state.model_edits.detect()
        self.state.model_edits.raise_if_unsupported()
        if self.turns is not None:
            self.turns.end()
        begin_rest, _ = self.rests
        begin_rest()

    def _looking(self) -> AbstractContextManager[None]:
        return _NOTHING if self.spot_checks is None else self.spot_checks.looking()

    def _spot_check(self, step: int, update_s: float) -> float:
        """Make a spot check of the next step if one is due; return the time taken in seconds."""
        begun = time.monotonic()
        if self.spot_checks is not None and step < self.last_step:
            self.spot_checks.updated(step, SPOT_CHECK_S + 10 * update_s)
        return time.monotonic() - begun


def _named(applied: Applied, totals: Totals, phase: str | None) -> dict[str, float]:
    """Return the metrics of an update; metrics of a phase are prefixed with its name."""
    metrics = applied.metrics
    if phase is not None:
        metrics = {f"{phase}/{name}": value for name, value in metrics.items()}
    return joined(metrics, totals.finished(applied.totals))
