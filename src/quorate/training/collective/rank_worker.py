"""Rank workers: the part of each rank in the steps of a loop.

Rank 0 calls ``check`` and ``collect_notes`` on all ranks, and ``update`` on all other ranks: all
ranks compute ``sums`` of a step and ``apply`` them.
"""

from __future__ import annotations

import copy
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import msgspec
import torch

from quorate.coordination.ownership import slowest_factor
from quorate.coordination.tree import Node, TreeSum, leaves, tree_sum
from quorate.data.feed import Feed
from quorate.data.source import Source
from quorate.engines.collective.exchange import StepContribution, exchange_contributions
from quorate.engines.collective.rank_control import RankControl
from quorate.engines.job import PassWithTotals, Task, Training, TrainingAgain, probe_fingerprint
from quorate.engines.model_changes import ModelChanges
from quorate.engines.shard_runner import ShardFailure, ShardRunner
from quorate.engines.spot_check import SpotCheck, SpotCheckResult
from quorate.engines.tracing import Batch
from quorate.engines.worker_status import Timesheet
from quorate.errors import RankError
from quorate.machine.limits import THREAD_EXIT_S
from quorate.replica.beside.values import NO_VALUES
from quorate.replica.buffers import Buffers
from quorate.replica.compute_thread import become_compute_thread
from quorate.replica.flat import Flat
from quorate.replica.notes import Note
from quorate.replica.replica import Replica
from quorate.replica.shard_sum import Part, ShardSum
from quorate.replica.streams import Stream
from quorate.replica.whole_batch.represented import Representations
from quorate.replica.witness import writes
from quorate.training.batch_loss import batch_loss_of, training_job_class
from quorate.training.collective import share
from quorate.training.collective.rank_batch_loss import RankBatchLoss, or_error
from quorate.training.drive import ReadyStep
from quorate.training.optimizing.known_optimizers import put_values
from quorate.training.optimizing.not_finite import are_finite
from quorate.training.optimizing.update import UpdateResult
from quorate.training.owners.rank_owners import RankOwners
from quorate.training.state import State
from quorate.training.step_update import StepUpdate, Use, summed_denominators
from quorate.training.worker_group import WorkerGroup

T = TypeVar("T")


class RankWorker:
    """The part of this rank in every step of a loop. Close the object at the end.

    Args:
        ranks: the connections to all ranks.
        workers: the workers of the trainer.
        state: the state on this rank.
        source: the source of the rows.
        steps: all steps that the loop may make.

    Attributes:
        values: the values of ``Shared`` for the next shards.
        sheet: the activities of this rank.

    Raises:
        SettingError: the loss is over the whole batch, and the optimizer needs a step's gradient
            again.
    """

    def __init__(
        self,
        ranks: RankControl,
        workers: WorkerGroup,
        state: State,
        source: Source,
        steps: range,
    ) -> None:
        assert isinstance(state.owners, RankOwners)
        self.ranks, self.state, self.owners = ranks, state, state.owners
        self.exchange = state.owners.exchange
        self.values = NO_VALUES
        self._source, self._workers, self._notes = (
            source,
            workers,
            workers.replicas.notes,
        )
        batch_loss = batch_loss_of(workers, state, source)
        on_ranks = (
            None if batch_loss is None else RankBatchLoss(batch_loss, self.exchange, self.beside)
        )
        self._update = StepUpdate(workers, state, source, self.second_pass, on_ranks)
        self._replica = replica = workers.replicas.alone(
            state, workers.master_device, self._set_buffers
        )
        self._keep_buffers()
        # Ranks write the slices of all owners if forward writes parameters, or if each rank has the
        # whole state of the optimizer.
        by_owners = all(each.is_spread for each in state.phases.optimizers) and not state.written
        self.exchange.open(state.parameters, by_owners=by_owners)
        self._written = writes.layout(state.parameters.views, state.written)
        threads = workers.config.workers.threads
        self._thread = _ComputeThread(f"quorate-rank-{ranks.rank}", threads, replica.device)
        self.sheet = Timesheet()
        self._runner = ShardRunner(ranks.rank, replica, self.sheet)
        self._job: Training = training_job_class(workers)(
            *(source, state.parameters, steps),
            owned=self._own_shards,
            loader_workers=workers.config.loading.processes,
            threads=threads,
        )
        self._phases_with_terms: set[str | None] = set()
        self._feed: Feed | None = None
        self._before: list[ShardSum] = []  # sums of all own shards of a step but the last
        self.sheet.tell("waiting")
        ranks.methods |= {"check": self.check, "collect_notes": self.collect_notes}

    def close(self) -> None:
        """End the compute thread and the feed."""
        self._thread.close()
        if self._feed is not None:
            self._feed.close()

    def settle(self) -> None:
        """Begin to watch user code for changes of the model. The ranks have been compared."""
        self.state.model_edits.set_baseline()
        # The model has the changes of the checkpoint: a later change may undo them. Their number is
        # this rank's own, and may be that of a later change on rank 0.
        self._runner.changes.take(replace(self.state.model_edits.model_changes, number=-1))
        self.stray_writes = self._workers.replicas.stray_writes(self.state)

    def leave(self, error: BaseException) -> None:
        """Raise an error in the thread that waits for a shard. Any thread may call."""
        self._thread.leave(error)
        self.exchange.gradient_buckets.leave(error)

    # --- work of all ranks at once ----------------------------------------------------------------

    def sums(
        self,
        step: int,
        order: list[int] | None,
        groups: list[dict[str, Any]] | None,
        changes: dict[str, Any] | None,
        values: dict[str, Any] | None,
    ) -> list[Part]:
        """Return the parts of the sum of a step, for ``apply``. All ranks call. Blocks.

        The parts have no gradient where the update needs a second pass in any case.

        Args:
            order: of buckets, from now on; None: unchanged, as for the further arguments.
            groups: values in the optimizer's groups on rank 0.
            changes: changes of the model by user code on rank 0.
            values: of ``Shared`` on rank 0.

        Raises:
            RankError: another rank is lost.
            Exception: an error of user code on any rank; the same on all ranks.
        """
        ranks, state = self.ranks, self.state
        # 1. The changes since the last update.
        if order is not None:
            self.exchange.order = order
        if groups is not None and not ranks.leads:
            for group, sent in zip(state.phases.param_groups, groups, strict=True):
                put_values(group, sent)
        if changes is not None:
            ranks.spread(share.values(state))
            self._runner.changes.take(ModelChanges.from_json(changes))
        self.take_values(values)
        if not ranks.leads:
            state.global_step = step
            self.stray_writes.begin()
        # 2. The sums.
        if not self._job.has_gradients(step):
            return self._representations(step)
        # An exchange in vain costs more than a forward pass: where a step had terms with totals of
        # their own, the totals of later steps of the phase are found first.
        v = self.shards_of(step)
        if v > 1 and self._source.plan.phase(step) in self._phases_with_terms:
            parts = self._computed_pass(step, self._job, has_gradients=False)
            if summed_denominators(parts, v).awaits_totals:
                return parts
        return self._computed_pass(step, self._job)

    def apply(self, step: int, parts: list[Part]) -> tuple[ReadyStep, UpdateResult]:
        """Make the update of a step from the result of ``sums``. All ranks call. Blocks."""
        ready = ReadyStep(step, parts, tuple(range(self.shards_of(step))), staleness=0)
        return ready, self._update(ready)

    def take_values(self, sent: dict[str, Any] | None) -> None:
        """Set the values of ``Shared`` on rank 0 for the next shards. All ranks call. Blocks."""
        if sent is None:
            return
        if self.ranks.leads:
            self.values = self.state.model_edits.model_changes.shared
        else:
            self.values = self.values.from_json(sent)
        if sent["tensors"] is not None:
            self.ranks.spread(self.values.tensors.vectors)
        self._replica.loss_call.shared.take(self.values)

    def check(self, options: dict[str, Any]) -> Mapping[int, SpotCheckResult]:
        """Make a spot check, and return the results by rank. All ranks call. Blocks.

        A rank with an error of user code has no result.
        """
        job = SpotCheck(self._source, self.state.parameters, range(0), **options)
        ticket = job.ticket
        task = Task(self.ranks.rank, *ticket, at=lambda phase: self.sheet.tell(phase, *ticket))

        def computed(replica: Replica, stream: Stream) -> Any:
            with closing(job.feed()) as feed:
                (output,) = job.compute(replica, stream, feed, task).outputs
                return output.value

        try:
            own = self.beside(computed, ("fetching", *ticket))
        except Exception:  # an error of user code is reported when training computes the shard
            own = None
        found = enumerate(self.ranks.gather(own))
        return {rank: msgspec.convert(fields, SpotCheckResult) for rank, fields in found if fields}

    def collect_notes(self) -> None:
        """Collect the notes made after the last step on rank 0. All ranks call. Blocks.

        Notes travel with the sum of a step. Notes made after a sum (in shards computed again for an
        optimizer's closure, or in a spot check) travel with the sum of the next step, and the last
        step has no next step.
        """
        found = self.ranks.gather([] if self.ranks.leads else self._notes.take())
        self._take_notes([[Note(*note) for note in notes] for notes in found])

    def _take_notes(self, found: Iterable[Sequence[Note]]) -> None:
        """Show the notes of all ranks, by rank, if this is rank 0."""
        for rank, notes in enumerate(found if self.ranks.leads else ()):
            for note in notes:
                self._notes.put(note, f"rank {rank}")

    def fingerprint(self) -> str:
        """Return a hash over the sums of shard 0 of step 0, to compare ranks. Blocks."""
        return self.beside(lambda replica, stream: probe_fingerprint(replica, self._source, stream))

    def beside(
        self, work: Callable[[Replica, Stream], T], at: tuple[str, int, int] | None = None
    ) -> T:
        """Return the result of ``work`` with the replica, outside of training steps. Blocks.

        Args:
            work: called in the compute thread.
            at: phase, step and shard to show in the status.
        """
        self._keep_buffers()
        if self._job.trace is not None and self._job.trace.is_on:
            self.sheet.record("beside training")  # until the next shard of training
        if at is not None:
            self.sheet.tell(*at)
        try:
            return self._thread.begin(lambda stream: work(self._replica, stream)).result()
        finally:
            self.restore()
            self.sheet.tell("waiting")

    # --- a step -----------------------------------------------------------------------------------

    def _representations(self, step: int) -> list[Part]:
        """Return the representations of all shards; on rank 0 alone with values. Blocks."""
        own = or_error(lambda: self.beside(partial(self._represented, step)))
        parts: list[Part] = []
        for node, found in zip(self._dealt(step), self.ranks.collect(own), strict=True):
            if isinstance(found, BaseException):
                self.ranks.raise_together(found)
            if node is not None:
                represented = [Representations(*each) for each in found]
                parts.append((node, ShardSum(0.0, {}, represented=represented)))
        return parts

    def second_pass(self, kind: type[TrainingAgain], step: int, use: Use[T], **inputs: Any) -> T:
        """Return the result of ``use`` for the new sum of a step. All ranks call. Blocks.

        All ranks call in lockstep: an optimizer receives the same gradients on all ranks, to the
        bit, and so needs the next gradient on all ranks or on none.
        """
        if kind is PassWithTotals:
            self._phases_with_terms.add(self._source.plan.phase(step))
        threads = self._workers.config.workers.threads
        steps = range(step, step + 1)
        # A replica reads the parameters anew for each job.
        job = kind(self._source, self.state.parameters, steps, threads=threads, **inputs)
        return use(tree_sum(self._computed_pass(step, job), self.shards_of(step), ShardSum.add))

    def _computed_pass(self, step: int, job: Training, *, has_gradients: bool = True) -> list[Part]:
        """Compute this rank's shards for a job, and exchange the sums. All ranks call. Blocks.

        Args:
            has_gradients: whether to exchange gradients too.
        """
        own, exchange, computing = StepContribution(), self.exchange, None
        self._keep_buffers()
        v, shards = self.shards_of(step), self._own_shards(step)
        if shards:
            exchange.gradient_buckets.clear()
            computing = self._thread.begin(partial(self._released, step, shards, job))
        gradient = exchange.sum(v) if has_gradients else None
        if computing is not None:
            try:
                own = StepContribution(*computing.result())
            except RankError:
                raise
            except Exception as error:  # an error of user code: all ranks raise the same error
                own = StepContribution(error=error)
        self.restore()  # first of all: user code looks at the model
        self.sheet.tell("pushing")
        try:
            # Before the contribution is sent: afterwards all ranks make the update, and ranks of a
            # host may share the memory of the parameters.
            self.stray_writes.end()
            own = own._replace(notes=[] if self.ranks.leads else self._notes.take())
            return self._exchanged(own, v, gradient)
        finally:
            self.sheet.tell("waiting")
            for before in self._before:
                self._replica.recycle(before)

    def _exchanged(self, own: StepContribution, v: int, gradient: Flat | None) -> list[Part]:
        """Exchange contributions to a step of V shards, and return the parts of its sum. Blocks.

        Raises:
            Exception: the error of user code on the lowest rank with an error.
        """
        buckets, ranks = self.exchange.gradient_buckets, self.ranks
        own = own._replace(
            is_finite=gradient is None or are_finite(gradient),
            sends_again=buckets.is_to_go_again,
            spans=self._spans(),
            stop=ranks.monitor.stop_signal,  # a heartbeat may come some steps later
        )
        handed = exchange_contributions(ranks, own, self._written)
        for rank, each in enumerate(handed if ranks.leads else ()):
            ranks.monitor.hear_signal(rank, each.stop)
        self._take_notes(each.notes for each in handed)
        self._take_spans(handed)
        parts: list[Part] = []
        for each in handed:
            if each.error is not None:
                ranks.raise_together(each.error)
            if each.node is not None and each.sum is not None:
                parts.append((each.node, each.sum))
        if gradient is None:
            return parts
        self.exchange.is_finite = all(each.is_finite for each in handed)
        if any(each.sends_again for each in handed):
            buckets.go_again()
            gradient = self.exchange.sum(v, waits=False)
            self.exchange.is_finite = all(ranks.gather(are_finite(gradient)))
        _, leftmost = min(parts, key=lambda part: leaves(part[0], v).start)
        leftmost.gradient = gradient  # a tree sum adds all parts to the leftmost part
        return parts

    def shards_of(self, step: int) -> int:
        """Return the number V of shards of a step."""
        return self._source.plan.shards_of(step)

    def slowest_factor(self, shards: int) -> float:
        """Return the shards of the busiest rank, as a multiple of an equal share of V shards."""
        return slowest_factor(self.exchange.dealt(shards), shards)

    def restore(self) -> None:
        """Restore the model after forward passes: buffers and parameters are the state's again."""
        self._set_buffers(self.state.buffers)
        trained = self.state.model_edits.trained()
        # Forward has left private copies of written parameters in the model; a replica in another
        # dtype has replaced all parameters.
        for name in trained if self._replica.moves_parameters else self.state.written:
            trained[name].data = self.state.parameters.views[name]
        self.state.model_edits.ignore_attributes()

    def _keep_buffers(self) -> None:
        buffers = self.state.buffers
        self._buffers = buffers.values(), buffers.integer_buffers()

    def _set_buffers(self, buffers: Buffers) -> None:
        buffers.set(*self._buffers)

    def _spans(self) -> Batch | None:
        """Return the activities of this rank since the last call; None without a trace."""
        trace, found = self._job.trace, self.sheet.recorded(cuts=False)
        if trace is None or found is None:
            return None
        # Workers of evaluations, threads of rank 0, have the same numbers as ranks.
        found["spans"] = [span._replace(track="rank") for span in found["spans"]]
        if not self.ranks.leads:  # on rank 0 the trace of the run has these spans
            found["spans"] += trace.take_own("main thread")
        return found

    def _take_spans(self, handed: Sequence[StepContribution]) -> None:
        """Add the activities of all ranks to the trace of rank 0, if the run is traced."""
        if self._job.trace is not None and self.ranks.leads:
            for rank, each in enumerate(handed):
                if each.spans is not None:
                    self._job.trace.take_batch(rank, each.spans)

    # --- the compute thread -----------------------------------------------------------------------

    def _dealt(self, step: int) -> Sequence[Node | None]:
        """Return the subtree of the shards of a step owned by each rank."""
        return self.exchange.dealt(self.shards_of(step))

    def _own_shards(self, step: int) -> range:
        """Return the shards of a step owned by this rank: the shards of a subtree."""
        node = self._dealt(step)[self.ranks.rank]
        return range(0) if node is None else leaves(node, self.shards_of(step))

    def _represented(self, step: int, _replica: Replica, stream: Stream) -> list[Representations]:
        """Return the representations of this rank's shards, and keep the rows. Blocks."""
        found: list[Representations] = []
        for shard in self._own_shards(step):
            found += self._computed(self._job, step, shard, stream).represented
        return found

    def _released(self, step: int, shards: range, job: Training, stream: Stream) -> Part:
        """Return the sum of some shards, without the gradient: the gradient buckets receive it."""
        try:
            return self._summed(step, shards, job, stream)
        finally:
            # The time of shards shows slow ranks, so the wait for the exchange must not count.
            self.sheet.tell("waiting")
            # Also after an error: all ranks wait for the buckets.
            self.exchange.gradient_buckets.release()

    def _summed(self, step: int, shards: range, job: Training, stream: Stream) -> Part:
        """See ``_released``."""
        buckets = self.exchange.gradient_buckets
        replica, self._before = self._replica, []
        tree: TreeSum[ShardSum] = TreeSum(self.shards_of(step), replica.add)
        for shard in shards:
            is_last = shard == shards[-1]
            if is_last:  # the exchange adds the earlier sums, bucket by bucket
                before = [part for _, part in sorted(tree.parts.items())]
                self._before = [copy.copy(part) for part in before]
                for part in before:
                    part.gradient = None
                buckets.begin([part.gradient for part in self._before if part.gradient is not None])
            result = self._computed(job, step, shard, stream, buckets if is_last else None)
            if is_last:
                result.gradient = None
            tree.put((0, shard), result)
        ((node, total),) = tree.parts.items()
        return node, total

    def _computed(
        self, job: Training, step: int, shard: int, stream: Stream, into: Flat | None = None
    ) -> ShardSum:
        rank_of = self.ranks.rank, self.ranks.size
        feed = self._feed = self._feed or self._job.feed(
            rank_of, (step, shard), self._replica.device
        )
        if job.trace is not None and not self.ranks.leads:
            job.trace.step = step
        outcome = self._runner.run(
            *(job, lambda: feed, stream, step, shard, [into]),
            is_only=True,
        )
        assert outcome is not None
        if isinstance(outcome, ShardFailure):
            raise outcome.error
        return outcome[0]


class _ComputeThread:
    """A thread for user code, so that settings of the script around its loop reach no shard.

    The thread is a daemon: user code that hangs does not delay the end of the process.
    """

    def __init__(self, name: str, threads: int, device: torch.device) -> None:
        self._threads, self._device = threads, device
        self._begun: queue.SimpleQueue[tuple[Future[Any], Callable[[Stream], Any]] | None] = (
            queue.SimpleQueue()
        )
        self._newest: Future[Any] = Future()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def begin(self, work: Callable[[Stream], T]) -> Future[T]:
        """Start ``work`` in the thread, and return its future result."""
        result: Future[T] = Future()
        self._newest = result
        self._begun.put((result, work))
        return result

    def leave(self, error: BaseException) -> None:
        """Raise an error in the caller that waits for the thread. Any thread may call."""
        with suppress(InvalidStateError):  # nobody waits
            self._newest.set_exception(error)

    def close(self) -> None:
        """End the thread. Blocks for ``THREAD_EXIT_S`` at most, because user code may hang."""
        self._begun.put(None)
        self._thread.join(THREAD_EXIT_S)

    def _run(self) -> None:
        become_compute_thread(self._threads, self._device)
        with Stream() as stream:
            while (begun := self._begun.get()) is not None:
                _settle(*begun, stream)
                del begun  # results may be large


def _settle(result: Future[Any], work: Callable[[Stream], Any], stream: Stream) -> None:
    """Give a future its result, unless ``leave`` came first."""
    with suppress(InvalidStateError):
        try:
            value = work(stream)
        except BaseException as error:  # the edge of the thread
            result.set_exception(error)
        else:
            result.set_result(value)
