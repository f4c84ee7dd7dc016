"""A member of a collective: the part in a step common to all ranks."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar, cast

import torch

from quorate.coordination.ownership import slowest_factor
from quorate.coordination.tree import leaves, tree_sum
from quorate.data.source import Source
from quorate.engines.collective.rank_control import RankControl
from quorate.engines.collective.step_contribution import StepContribution, exchange_contributions
from quorate.engines.drawing import drawing
from quorate.engines.fingerprints import probe_fingerprint
from quorate.errors import RankError
from quorate.machine.limits import THREAD_EXIT_S
from quorate.replica.beside.values import Values
from quorate.replica.buffers import Buffers
from quorate.replica.compute_thread import become_compute_thread
from quorate.replica.flat import Flat
from quorate.replica.replica import Replica
from quorate.replica.shard_sum import Part, ShardSum
from quorate.replica.streams import Stream
from quorate.replica.witness import writes
from quorate.training.collective.contrasting import Contrasting, Through
from quorate.training.collective.own_shards import OwnShards
from quorate.training.optimizing.not_finite import are_finite
from quorate.training.optimizing.update import Applied
from quorate.training.state import State

T = TypeVar("T")
_Done = tuple[object, BaseException | None]  # the result, or the raised error


class Member:
    """The part of this rank in every step of a loop. Close the object at the end.

    Args:
        ranks: the connections to all ranks.
        state: the state on this rank.
        make_replica: makes the replica from a function to set buffers; the replica computes with
            the model of the state, and not with a copy.
        source: the source of the rows.
        steps: all steps that the loop may make.
        contrasting: this rank's part in a loss over whole batches; None without such a loss.
        loader_workers: number of processes to load rows.
        threads: intra-op threads of each loader, and of the thread that computes.
    """

    def __init__(
        self,
        ranks: RankControl,
        state: State,
        make_replica: Callable[[Callable[[Buffers], None]], Replica],
        source: Source,
        steps: range,
        *,
        contrasting: Contrasting | None,
        loader_workers: int,
        threads: int,
    ) -> None:
        self._ranks, self._state, self._source = ranks, state, source
        self._contrasting = contrasting
        self._replica = replica = make_replica(self._set_buffers)
        self._keep_buffers()
        self.raised: Exception | None = None  # an error in a shard, raised on all ranks
        assert state.exchange is not None
        self.exchange = state.exchange
        # Ranks write the slices of all owners if forward writes parameters, or if each rank has the
        # whole state of the optimizer.
        by_owners = state.optimizer_of_ranks.is_sharded and not state.written
        self.exchange.open(state.parameters, by_owners=by_owners)
        self._written = writes.layout(state.parameters.views, state.written)
        self._thread = _Own(f"quorate-rank-{ranks.rank}", threads, replica.device)
        self._shards = OwnShards(
            *((ranks.rank, ranks.size), replica, self.exchange, source, state.parameters, steps),
            represents=contrasting is not None,
            loader_workers=loader_workers,
            threads=threads,
        )
        self.sheet = self._shards.sheet
        self.sheet.tell("waiting")

    def close(self) -> None:
        """End the compute thread and the feed."""
        self._thread.close()
        self._shards.close()

    def leave(self, error: BaseException) -> None:
        """Raise an error in the thread that waits for a shard. Any thread may call."""
        self._thread.leave(error)
        self.exchange.gradient_buckets.leave(error)

    def read(self, values: Values) -> None:
        """Set the values of ``Shared`` for the next shards."""
        self._replica.called.shared.take(values)

    def take_spans(self, rank: int, handed: StepContribution) -> None:
        """Add the activities of a rank to the trace, if the run is traced."""
        if handed.spans is not None:
            self._shards.take_spans(rank, handed.spans)

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
        self._shards.note_other_spans()
        if at is not None:
            self.sheet.tell(*at)
        try:
            return self._thread.do(lambda stream: work(self._replica, stream))
        finally:
            self.restore()
            self.sheet.tell("waiting")

    def parts(
        self,
        step: int,
        *,
        tell: Callable[[StepContribution], StepContribution] = lambda own: own,
        hear: Callable[[int, StepContribution], None] = lambda _rank, _handed: None,
    ) -> list[Part]:
        """Compute this rank's shards of a step, and exchange the sums. All ranks call. Blocks.

        Args:
            tell: called when the shards are computed; adds messages to this rank's contribution.
            hear: called with the number and the contribution of each rank.

        Raises:
            RankError: another rank is lost.
            Exception: an error of user code on any rank; the same on all ranks.
        """
        own, exchange, ask, through = StepContribution(), self.exchange, None, None
        self._keep_buffers()
        v, shards = self.shards_of(step), self._shards.of(step)
        if self._contrasting is not None and v > 1:  # a single shard is a whole batch
            through = self._through(self._contrasting, step, shards)
        if shards:
            exchange.gradient_buckets.clear()
            ask = self._thread.begin(partial(self._released, step, shards, through))
        gradient = self._sum(v, through)
        if ask is not None:
            try:
                own = StepContribution(*ask())
            except RankError:
                raise
            except Exception as error:  # an error of user code: all ranks raise the same error
                own = StepContribution(error=error)
        self.restore()  # first of all: ``tell`` and user code look at the model
        self.sheet.tell("pushing")
        try:
            own = tell(own)._replace(
                is_finite=are_finite(gradient),
                sends_again=exchange.gradient_buckets.is_to_go_again,
                spans=self._shards.spans(),
            )
            parts, handed = exchange_contributions(exchange.ranks, own, self._written, hear)
            if any(each.sends_again for each in handed):
                exchange.gradient_buckets.go_again()
                gradient = self._sum(v, through, waits=False)
                found = exchange.ranks.gather(are_finite(gradient))
                exchange.is_finite = all(found)
            else:
                exchange.is_finite = all(each.is_finite for each in handed)
        except RankError:
            raise
        except Exception as error:
            self.raised = error
            raise
        finally:
            self.sheet.tell("waiting")
            self._shards.recycle()
        _, leftmost = min(parts, key=lambda part: leaves(part[0], v).start)
        leftmost.gradient = gradient  # a tree sum adds all parts to the leftmost part
        return parts if through is None else through.made_whole(parts, v)

    def _sum(self, shards: int, through: Through | None, *, waits: bool = True) -> Flat:
        gradient = self.exchange.sum(shards, waits=waits)
        if through is not None:
            through.add_to(gradient, self.exchange.slices)
        return gradient

    def _through(self, contrasting: Contrasting, step: int, shards: range) -> Through:
        """Make the first pass over a step together with all ranks. Blocks."""
        try:
            return contrasting(step, shards, self._shards.represented, self.beside)
        except RankError:
            raise
        except Exception as error:
            self.raised = error
            raise

    def applied(self, parts: list[Part], step: int, n: int) -> Applied:
        """Make update number n, of a step, together with all ranks. Blocks."""
        shards = self._source.plan.shards_of(step)
        takes_closure = self._state.optimizer.takes_closure and self._contrasting is None
        again = partial(self._again, step) if takes_closure else None
        self._state.begin_phase(self._source.plan.phase(step))
        with drawing("update", self._source.plan, n):
            return self._state.update.apply(parts, shards, n, shards, again)

    def _again(self, step: int, take: Callable[[ShardSum], None]) -> None:
        """Compute the step's sum at the present parameters, and pass the sum to ``take``. Blocks.

        All ranks call in lockstep: an optimizer receives the same gradients on all ranks, to the
        bit, and so needs the next gradient on all ranks or on none.
        """
        self._shards.take_parameters()
        parts = self.parts(step)
        take(tree_sum(parts, self.shards_of(step), ShardSum.add))

    def shards_of(self, step: int) -> int:
        """Return the number V of shards of a step."""
        return self._source.plan.shards_of(step)

    def slowest_factor(self, shards: int) -> float:
        """Return the shards of the busiest rank, as a multiple of an equal share of V shards."""
        return slowest_factor(self.exchange.dealt(shards), shards)

    def restore(self) -> None:
        """Restore the model after forward passes: buffers and parameters are the state's again."""
        self._set_buffers(self._state.buffers)
        trained = self._state.user_changes.trained()
        # Forward has left private copies of written parameters in the model; a replica in another
        # dtype has replaced all parameters.
        for name in trained if self._replica.moves_parameters else self._state.written:
            trained[name].data = self._state.parameters.views[name]
        self._state.user_changes.overlook()

    def _keep_buffers(self) -> None:
        buffers = self._state.buffers
        self._buffers = buffers.values(), buffers.integer_buffers()

    def _set_buffers(self, buffers: Buffers) -> None:
        buffers.set(*self._buffers)

    def _released(self, step: int, shards: range, through: Through | None, stream: Stream) -> Part:
        """Return the sum of some shards, without the gradient: the gradient buckets receive it."""
        gradients = None if through is None else through.gradients
        try:
            return self._shards.summed(step, shards, gradients, stream)
        finally:
            # The time of shards shows slow ranks, so the wait for the exchange must not count.
            self.sheet.tell("waiting")
            # Also after an error: all ranks wait for the buckets.
            self.exchange.gradient_buckets.release()


class _Own:
    """A thread for user code, so that settings of the script around its loop reach no shard.

    The thread is a daemon: user code that hangs does not delay the end of the process.
    """

    def __init__(self, name: str, threads: int, device: torch.device) -> None:
        self._threads, self._device = threads, device
        self._asked: queue.SimpleQueue[Callable[[Stream], None] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[_Done] | None = None  # the result that a caller waits for
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def do(self, work: Callable[[Stream], T]) -> T:
        """Return the result of ``work``, called in the thread. Blocks."""
        return self.begin(work)()

    def begin(self, work: Callable[[Stream], T]) -> Callable[[], T]:
        """Start ``work`` in the thread. The returned function returns the result, and blocks."""
        done: queue.SimpleQueue[_Done] = queue.SimpleQueue()
        self._done = done

        def answer(stream: Stream) -> None:
            try:
                done.put((work(stream), None))
            except BaseException as error:  # the edge of the thread
                done.put((None, error))

        def ask() -> T:
            result, error = done.get()
            self._done = None
            if error is not None:
                raise error
            return cast(T, result)  # without an error there is a result

        self._asked.put(answer)
        return ask

    def leave(self, error: BaseException) -> None:
        """Raise an error in the caller that waits for the thread. Any thread may call."""
        if (done := self._done) is not None:
            done.put((None, error))

    def close(self) -> None:
        """End the thread. Blocks for ``THREAD_EXIT_S`` at most, because user code may hang."""
        self._asked.put(None)
        self._thread.join(THREAD_EXIT_S)

    def _run(self) -> None:
        become_compute_thread(self._threads, self._device)
        with Stream() as stream:
            while (work := self._asked.get()) is not None:
                work(stream)
