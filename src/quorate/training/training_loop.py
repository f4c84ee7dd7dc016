"""The training loop: makes the updates decided by the coordinator, and reports each update.

``start_workers`` starts the workers and their coordinator, and joins the eight files below to an
iterator of updates. ``TrainingLoop`` takes updates from the iterator, and yields a report of each.
An update passes through the files in this order; ``grep -n "def NAME" FILE`` finds each place:

    training/drive.py              drive: carries out the coordinator's effects in order
    coordination/coordinator.py    handle: turns an event into effects, such as "compute shard 3"
    engines/job_channel.py         send: passes shards to workers, and receives the results
    engines/shard_runner.py        run: computes the shards of a worker, in its thread or process
    engines/job.py                 compute_run: fetches the rows of a shard and the parameters
    replica/replica.py             gradient: forward and backward pass of a shard
    training/step_update.py        __call__: the update, with second passes where a loss needs them
    training/optimizing/update.py  apply: sum, mean, clipping, optimizer step, average, schedule

With ranks (``engines/collective``), ``training/collective/lead.py`` supplies the iterator instead:
all ranks compute each step, and make the update, at the same time (``rank_worker.py``).

Legend: V shards of a step. A step is a batch; under "async" and "bounded:K" a step is a shard of a
batch (``coordination/rules.py``). Each step makes one update. Steps are numbered from 0 in the
order of the data; ``n`` and ``global_step`` count the updates made.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

from quorate.coordination.coordinator import Coordinator
from quorate.coordination.protocol import Stop
from quorate.coordination.run_event import NOTE, RunEvent
from quorate.data.source import Source
from quorate.engines import Transport
from quorate.engines.processes.transport import servers_of
from quorate.engines.seeded_draws import seeded_draws
from quorate.engines.spot_check import SpotChecks, ask_workers
from quorate.machine.limits import SPOT_CHECK_S
from quorate.replica.deterministic import renewal_of_settings
from quorate.replica.totals import merge_metrics
from quorate.replica.witness.stray_writes import StrayWrites
from quorate.services.report import Report
from quorate.training.batch_loss import batch_loss_of, training_job_class
from quorate.training.drive import ReadyStep, drive
from quorate.training.not_finite_shard import skip_update
from quorate.training.observer import observed
from quorate.training.optimizing.update import UpdateResult
from quorate.training.owners.server_sync import let_servers_own
from quorate.training.state import State
from quorate.training.step_update import PassByWorkers, StepUpdate
from quorate.training.stop import Stops

if TYPE_CHECKING:
    from quorate.training.setup import TrainingSetup

# A worker receives consecutive shards at once, as many as take this long, in seconds: about fifty
# times the cost of dealing a shard.
DEALT_AT_ONCE_S = 4e-3
ALL_AT_ONCE_S = 1e6  # for shards that flow through stages: all shards of a worker


class LoopProgress(Protocol):
    """The progress of a loop, known to the ``Coordinator`` or, with ranks, to rank 0."""

    first_step: int  # number of updates applied before the loop
    begun_at: float | None  # time.monotonic() when the first worker was ready; None: not known
    reason: str  # why the loop ended where it ended


class StartedWorkers(NamedTuple):
    """The workers of a loop at work, on any engine."""

    transport: Transport  # reaches the workers: threads, processes, ranks or Ray actors
    updates: Iterator[tuple[ReadyStep, UpdateResult]]  # makes an update, then yields the result
    progress: LoopProgress
    stray_writes: StrayWrites  # finds parameters written by shards
    spot_checks: SpotChecks | None  # compare results of workers now and then; None: no checks


@contextmanager
def start_workers(loop: TrainingLoop) -> Iterator[StartedWorkers]:
    """Start the workers of a loop and their coordinator; end the workers afterwards."""
    setup, state, plan, stops = loop.setup, loop.state, loop.plan, loop.stops
    workers, source, say = setup.workers, loop.source, setup.say
    config = workers.config
    with ExitStack() as stack:
        # 1. The workers, and the job that they compute until the loop ends.
        stack.callback(state.end_parts)  # after the workers: processes that hold optimizer state
        unobserved = workers.new_transport(state, source, say)
        facts = {**setup.facts(state), "pipeline": workers.replicas.pipeline}
        transport = stack.enter_context(closing(observed(unobserved, state, facts)))
        timeout_s = workers.timeout_s if transport.can_replace else None
        # Spot checks: now and then all workers compute one shard, and the bits are compared. An
        # observer of the loop may replace the transport: then there are no spot checks.
        ask = partial(ask_workers, transport, len(workers.groups))
        checks = workers.spot_checks(state, source, ask) if transport is unobserved else None
        job = training_job_class(workers)(
            source,
            state.parameters,
            # Steps left open by a run that applied steps out of order come first.
            range(min([state.global_step, *state.left_open]), loop.last_step),
            on_snapshots=workers.on_snapshots,
            loader_workers=config.loading.processes,
            threads=config.workers.threads,
        )
        # 2. The update of a step: a loss or an optimizer may compute the step once more.
        second_pass = PassByWorkers(
            transport=transport,
            source=source,
            parameters=state.parameters,
            threads=config.workers.threads,
            timeout_s=timeout_s,
            say=say,
        )
        batch_loss = batch_loss_of(workers, state, source)
        update = StepUpdate(workers, state, source, second_pass, batch_loss)
        if (servers := servers_of(unobserved)) is not None:
            stack.enter_context(let_servers_own(state, servers, say))
        channel = stack.enter_context(closing(transport.open(job)))
        state.model_edits.set_baseline()
        stack.enter_context(stops.calling(lambda reason: channel.post(Stop(reason))))
        stray_writes = workers.replicas.stray_writes(state)

        def apply(ready: ReadyStep) -> tuple[ReadyStep, UpdateResult]:
            stray_writes.end()
            result = update(ready)
            loop.record_update(ready, result)
            if servers is not None:
                state.model_edits.updated(state.owners.fetch_parameters)
            return ready, result

        # 3. The coordinator, which deals the shards, and the iterator of updates.
        run_s = ALL_AT_ONCE_S if workers.replicas.are_in_stages else DEALT_AT_ONCE_S
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
            timeout_s=timeout_s,
            run_s=run_s if transport.takes_runs else 0.0,
        )
        updates = drive(
            coordinator,
            channel,
            apply,
            say,
            copied_shards=workers.stragglers.copied_shards,
            stopping=lambda: stops.reason,
            before_shard=stops.start_time_limits,
        )
        yield StartedWorkers(transport, updates, coordinator, stray_writes, checks)


class TrainingLoop:
    """A loop over updates, from the present state to ``last_step``.

    Args:
        setup: the setup of the trainer.
        state: the state, restored from the newest checkpoint.
        source: the rows of each shard.
        last_step: number of updates at the end of the loop, counted from the first run.
        stops: requests to end the loop.
        start: starts the workers: ``start_workers`` or, with ranks, ``start_rank_loop``.
    """

    def __init__(
        self,
        setup: TrainingSetup,
        state: State,
        source: Source,
        last_step: int,
        stops: Stops,
        start: Callable[[TrainingLoop], AbstractContextManager[StartedWorkers]],
    ) -> None:
        self.setup, self.state, self.source, self.plan = setup, state, source, source.plan
        self.last_step, self.stops = last_step, stops
        # Workers take seconds to start: none are started after a request to stop.
        self.has_updates = state.global_step < last_step and stops.reason is None
        self.transport: Transport | None = None  # None: workers are not started
        self._start = start
        self._renew_settings = renewal_of_settings()

    @contextmanager
    def started(self) -> Iterator[Iterator[Report]]:
        """Start the workers of the loop, and end the workers afterwards.

        Yields:
            An iterator that makes the updates, and yields a report after each.

        Raises:
            UserError: a change by user code since the last loop cannot be sent to workers.
        """
        if not self.has_updates:
            yield iter(())
            return
        edits = self.state.model_edits
        edits.detect()  # since the last loop
        edits.raise_if_unsupported()
        with self._start(self) as workers, closing(self._reports(workers)) as reports:
            self.transport = workers.transport
            yield reports

    def record_update(self, ready: ReadyStep, result: UpdateResult) -> None:
        """Count an update in the state; skip the update if values were not finite.

        Raises:
            NotFiniteError: the update was not made, and ``nonfinite`` is "stop".
        """
        if result.not_finite is not None:
            skip_update(self, ready.step, result)
        self.state.count_update(ready.step)

    def _reports(self, started: StartedWorkers) -> Generator[Report]:
        """Yield a report of each update.

        Raises:
            NotFiniteError: a loss or gradient was not finite; that update was not made.
        """
        state, plan, say, progress = self.state, self.plan, self.setup.say, started.progress
        workers, checks = self.setup.workers, started.spot_checks
        notes = workers.replicas.notes
        state.tally.include(len(workers.groups) - 1)  # list all workers, also those without a shard
        self._end_user_code(started)  # of the callbacks' ``started``
        state.model_edits.detect_draws(first=True)
        speed, begun = SpeedMeter(), time.monotonic()
        named: frozenset[str] = frozenset()
        for ready, result in started.updates:
            n = state.global_step
            update_s = time.monotonic() - begun
            if checks is not None and n < self.last_step:
                # At most so long until the first result: a shard takes at most about an update.
                checks.updated(n, SPOT_CHECK_S + 10 * update_s)
            # 1. Tell the user what workers and the update have noticed.
            for remark in result.remarks:
                notes.add(remark)
            for doubt in result.buffer_doubts:
                notes.question_values(doubt)
            workers.replicas.tell(say)
            switched_off = state.model_edits.model_changes.switched_off
            if new := result.missing - named - switched_off:
                named |= new
                say(f"no gradient in step {ready.step}, so unchanged: {', '.join(sorted(new))}")
            # 2. Measure the speed, without the start of the workers and without the first update.
            if n == progress.first_step + 1 and progress.begun_at is not None:
                update_s -= progress.begun_at - begun
            if n == progress.first_step + 2:
                speed.restart()
            rows = self._count_rows(ready)
            speed.add(update_s, rows)
            # 3. Let the caller look at the report, and change the model. Random numbers drawn by
            #    the caller depend on the seed and n alone.
            report = self._report(ready, result, rows, speed)
            with (
                nullcontext() if checks is None else checks.looking(),
                seeded_draws("between", plan, n),
            ):
                yield report
            self._end_user_code(started)
            state.model_edits.detect_draws()
            begun = time.monotonic()  # excludes the caller's time on a report
        workers.replicas.tell(say)
        if not workers.keeps_bits(plan.shards):
            say(RunEvent(state.tally.summary(), NOTE))
        elif doubts := notes.doubts:  # repeated here: the lines may have been shown long ago
            reasons = "1 reason" if len(doubts) == 1 else f"{len(doubts)} reasons, the first"
            say(f"the weights may have different bits in another run ({reasons}): {doubts[0]}")
        if state.global_step < self.last_step:
            stopped = f"stopped after step {state.global_step:,}: {progress.reason}"
            say(RunEvent(stopped, NOTE))

    def _count_rows(self, ready: ReadyStep) -> int:
        """Return the rows of an update; add the absent rows of the batch to ``dropped_rows``."""
        plan, state, step = self.plan, self.state, ready.step
        rows = batch_rows = plan.batch_rows(step)
        if len(ready.shards) < plan.shards_of(step):
            rows = sum(len(plan.shard(step, shard)) for shard in ready.shards)
        state.dropped_rows += batch_rows - rows
        return rows

    def _report(
        self, ready: ReadyStep, result: UpdateResult, rows: int, speed: SpeedMeter
    ) -> Report:
        """Return the report of the newest update."""
        plan, state, n = self.plan, self.state, self.state.global_step
        replicas, phase = self.setup.workers.replicas, plan.phase(ready.step)
        counts = state.tally.counts
        epoch = plan.epoch(n - 1)  # the epoch of this update: n counts it already
        ends_epoch = n % plan.steps_per_epoch == 0
        if ends_epoch and state.dropped_rows:
            of = f"{state.dropped_rows:,} of {plan.dealt_rows:,} rows"
            self.setup.say(RunEvent(f"epoch {epoch + 1}: {of} were dropped", NOTE))
            state.dropped_rows = 0
        means, denominators = result.metrics, result.denominators
        if phase is not None:  # phases may have metrics of the same name
            means = {f"{phase}/{name}": value for name, value in means.items()}
            denominators = {f"{phase}/{name}": value for name, value in denominators.items()}
        return Report(
            global_step=n,
            epoch=epoch,
            rows=rows,
            dropped_rows=plan.batch_rows(ready.step) - rows,
            weight=result.weight,
            metrics=merge_metrics(means, replicas.totals.finished(result.totals)),
            worker_losses=result.worker_losses(),
            staleness=ready.staleness,
            fresh=[*counts["fresh"]],
            stale=[*counts["stale"]],
            dropped=[*counts["dropped"]],
            not_finite=state.not_finite,
            lr=result.lrs[0],
            lrs=result.lrs if len(result.lrs) > 1 else [],
            grad_norm=result.grad_norm,
            examples_per_s=speed.examples_per_s,
            last_step=self.last_step,
            epochs=-(-self.last_step // plan.steps_per_epoch),
            ends_epoch=ends_epoch,
            eta_s=speed.eta_s(self.last_step - n),
            doubts=replicas.notes.take_doubts(),
            totals=result.totals,
            phase=phase,
            weights=denominators,
        )

    def _end_user_code(self, started: StartedWorkers) -> None:
        """End the time of user code: record changes of the model before the next shard is dealt.

        From here on, only updates may write parameters: see ``StrayWrites``. Other loops may have
        had a turn meanwhile, with settings of their own.
        """
        self._renew_settings()
        edits = self.state.model_edits
        edits.detect()
        edits.raise_if_unsupported()
        self.state.owners.send_user_changes(edits.have_values_changed)
        started.stray_writes.begin()


class SpeedMeter:
    """The pace over the last updates, without the time that a caller spent on reports."""

    UPDATES = 50  # number of updates in the mean

    def __init__(self) -> None:
        self._last: deque[tuple[float, int]] = deque()  # (seconds, rows)
        self._seconds, self._rows = 0.0, 0  # sums over ``_last``

    def add(self, seconds: float, rows: int) -> None:
        """Add an update."""
        self._last.append((seconds, rows))
        self._seconds += seconds
        self._rows += rows
        if len(self._last) > self.UPDATES:
            old_s, old_rows = self._last.popleft()
            self._seconds -= old_s
            self._rows -= old_rows

    def restart(self) -> None:
        """Begin anew: the updates so far are not representative."""
        self._last.clear()
        self._seconds, self._rows = 0.0, 0

    @property
    def examples_per_s(self) -> float:
        """Rows per second."""
        return self._rows / self._seconds

    def eta_s(self, updates: int) -> float:
        """Return the time of a number of updates, in seconds."""
        return updates * self._seconds / len(self._last)
