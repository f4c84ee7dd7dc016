"""A member of a collective: what every rank does of a step, whoever leads."""

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
_Done = tuple[object, BaseException | None]  # the result, or what was raised


class Member:
    """This rank's part in every step of a loop. ``close`` it.

    Args:
        ranks: all of them.
        state: of this rank.
        make_replica: from what sets its buffers, which computes with the state's model itself.
        source: of the rows.
        steps: that the loop may make.
        contrasting: this rank's part in the loss, if that is over whole batches.
        loader_workers: processes that load rows.
        threads: intra-op threads of whatever loads or computes.
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
        self.raised: Exception | None = None  # in shards, on all ranks alike
        assert state.exchange is not None
        self.exchange = state.exchange
        # What forward writes is put there by all ranks, whoever owns it; so is what an optimizer
        # makes of parameters that every rank has the whole state of.
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
        """End the thread and the feed."""
        self._thread.close()
        self._shards.close()

    def leave(self, error: BaseException) -> None:
        """Have whoever waits for a shard not wait for it any more: it raises. Any thread."""
        self._thread.leave(error)
        self.exchange.gradient_buckets.leave(error)

    def read(self, values: Values) -> None:
        """Have the next shards read these values of ``Shared``."""
        self._replica.called.shared.take(values)

    def take_spans(self, rank: int, handed: StepContribution) -> None:
        """Take what a rank was at into the trace, if there is one."""
        if handed.spans is not None:
            self._shards.take_spans(rank, handed.spans)

    def fingerprint(self) -> str:
        """Return a hash over what shard 0 of step 0 yields: is every rank's the same? Blocks."""
        return self.beside(lambda replica, stream: probe_fingerprint(replica, self._source, stream))

    def beside(
        self, work: Callable[[Replica, Stream], T], at: tuple[str, int, int] | None = None
    ) -> T:
        """Return what ``work`` computes with the replica beside the training. Blocks.

        Args:
            at: phase, step and shard to tell of it.
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
        """Compute what this rank owns of a step, and exchange it. Blocks.

        Args:
            tell: called when it has computed: adds what others are to hear of.
            hear: hears what each rank has handed over.

        Raises:
            RankError: another rank is gone.
            Whatever user code raised on any rank: on every rank.
        """
        own, exchange, ask, through = StepContribution(), self.exchange, None, None
        self._keep_buffers()
        v, shards = self.shards_of(step), self._shards.of(step)
        if self._contrasting is not None and v > 1:  # one shard is a whole batch
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
            except Exception as error:  # of user code: on every rank it is raised as one
                own = StepContribution(error=error)
        self.restore()  # first of all: others are about to look at the model
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
        leftmost.gradient = gradient  # in whose memory the others are added
        return parts if through is None else through.made_whole(parts, v)

    def _sum(self, shards: int, through: Through | None, *, waits: bool = True) -> Flat:
        gradient = self.exchange.sum(shards, waits=waits)
        if through is not None:
            through.add_to(gradient, self.exchange.slices)
        return gradient

    def _through(self, contrasting: Contrasting, step: int, shards: range) -> Through:
        """Make the first pass of a step with all other ranks. Blocks."""
        try:
            return contrasting(step, shards, self._shards.represented, self.beside)
        except RankError:
            raise
        except Exception as error:
            self.raised = error
            raise

    def applied(self, parts: list[Part], step: int, n: int) -> Applied:
        """Make update number n of a step with all other ranks. Blocks."""
        shards = self._source.plan.shards_of(step)
        takes_closure = self._state.optimizer.takes_closure and self._contrasting is None
        again = partial(self._again, step) if takes_closure else None
        self._state.begin_phase(self._source.plan.phase(step))
        with drawing("update", self._source.plan, n):
            return self._state.update.apply(parts, shards, n, shards, again)

    def _again(self, step: int, take: Callable[[ShardSum], None]) -> None:
        """Hand the step's sum at the parameters as they now are to ``take``. Blocks.

        All ranks do so in lockstep: an optimizer has the same gradients on each, to the bit, and so
        asks for the next one on all of them or on none.
        """
        self._shards.take_parameters()
        parts = self.parts(step)
        take(tree_sum(parts, self.shards_of(step), ShardSum.add))

    def shards_of(self, step: int) -> int:
        """Return V of a step."""
        return self._source.plan.shards_of(step)

    def slowest_factor(self, shards: int) -> float:
        """Return how many times an equal part of a step's shards the busiest rank has."""
        return slowest_factor(self.exchange.dealt(shards), shards)

    def restore(self) -> None:
        """Give the model what it had before its forward passes, which is what the state has."""
        self._set_buffers(self._state.buffers)
        trained = self._state.user_changes.trained()
        # Forward has left private copies in their places; or all are in another dtype meanwhile.
        for name in trained if self._replica.moves_parameters else self._state.written:
            trained[name].data = self._state.parameters.views[name]
        self._state.user_changes.overlook()

    def _keep_buffers(self) -> None:
        buffers = self._state.buffers
        self._buffers = buffers.values(), buffers.integer_buffers()

    def _set_buffers(self, buffers: Buffers) -> None:
        buffers.set(*self._buffers)

    def _released(self, step: int, shards: range, through: Through | None, stream: Stream) -> Part:
        """Return the sum of some shards; its gradient goes to the gradient buckets instead."""
        gradients = None if through is None else through.gradients
        try:
            return self._shards.summed(step, shards, gradients, stream)
        finally:
            # Not the time of its shards: whoever is slow is found by those.
            self.sheet.tell("waiting")
            # Also after an error: other ranks wait for buckets.
            self.exchange.gradient_buckets.release()


class _Own:
    """A thread for user code: what the script has around its loop reaches no shard.

    It is a daemon: user code that hangs does not hold up the end of the process.
    """

    def __init__(self, name: str, threads: int, device: torch.device) -> None:
        self._threads, self._device = threads, device
        self._asked: queue.SimpleQueue[Callable[[Stream], None] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[_Done] | None = None  # what is waited for
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def do(self, work: Callable[[Stream], T]) -> T:
        """Return what ``work`` returns in the thread. Blocks."""
        return self.begin(work)()

    def begin(self, work: Callable[[Stream], T]) -> Callable[[], T]:
        """Begin to work in the thread. What is returned returns what ``work`` does, and blocks."""
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
            return cast(T, result)  # nothing was raised

        self._asked.put(answer)
        return ask

    def leave(self, error: BaseException) -> None:
        """Have whoever waits for the thread raise. Any thread."""
        if (done := self._done) is not None:
            done.put((None, error))

    def close(self) -> None:
        """End the thread, if it is not in user code."""
        self._asked.put(None)
        self._thread.join(THREAD_EXIT_S)

    def _run(self) -> None:
        become_compute_thread(self._threads, self._device)
        with Stream() as stream:
            while (work := self._asked.get()) is not None:
                work(stream)
