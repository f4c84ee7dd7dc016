"""Spot checks: between two updates all workers compute the same shard twice, with equal results.

A spot check is a job from the current parameters. The coordinator compares the ``SpotCheckResult``
of all workers and discards everything computed, so that training gives the same bits with and
without spot checks. A replica in stages computes the shard twice through the stages, as in
training, and twice in one piece; all four results have to be equal.

A check takes the time of some shards. ``SpotChecks`` makes the next check when checks take a small
share of the time, and waits for no worker for long.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import InitVar, asdict, dataclass, field, replace

import msgspec
import torch

from quorate.coordination import protocol
from quorate.coordination.plan import abridged
from quorate.data.feed import CPU, Feed
from quorate.data.source import Batch, Source, Ticket
from quorate.data.streams.stream import Stream as RowStream
from quorate.engines import Transport
from quorate.engines.job import Job, Task, shard_seed
from quorate.engines.stages.pipelined_replica import PipelinedReplica
from quorate.machine.limits import SPOT_CHECK_ANSWER_S, SPOT_CHECK_JOIN_S
from quorate.replica.fingerprint import fingerprint
from quorate.replica.flat import Flat
from quorate.replica.loss import Loss
from quorate.replica.notes import Notes
from quorate.replica.outputs.rows import Piece
from quorate.replica.replica import Replica
from quorate.replica.shard_sum import ShardSum
from quorate.replica.streams import Stream
from quorate.replica.witness.again import Computed, ShardArgs, doubts, result_of
from quorate.replica.witness.kept import Kept, changed, kept
from quorate.replica.witness.module_trace import Event, ModuleTrace
from quorate.replica.witness.outside import OutsideChecks
from quorate.replica.witness.values import tensor_text
from quorate.replica.witness.words import module_text

SHARE = 0.005  # of the time
MOST_FINDINGS = 3  # further checks would repeat the same findings
_NOTHING = nullcontext()


@dataclass(frozen=True)
class SpotCheckResult:
    """The result of one worker, sent to the coordinator as the output of the shard.

    Attributes:
        data: fingerprint of the rows.
        result: fingerprint of the shard's sums.
        doubts: warnings about this worker alone.
        forward: inputs and outputs of all modules; only of a closer check.
        gradient: the gradient of each parameter, as text; only of a closer check.
        kept: values kept by the model and the loss; only of a closer check.
    """

    data: str
    result: str
    doubts: list[str]
    forward: list[Event] = field(default_factory=list)
    gradient: dict[str, str] = field(default_factory=dict)
    kept: Kept = field(default_factory=dict)


# --- the workers ----------------------------------------------------------------------------------


@dataclass(eq=False, kw_only=True)
class SpotCheck(Job):
    """The job of a spot check: all workers compute the same shard.

    Args:
        ticket: step and shard.
        closer: whether results include module outputs, gradients, and values kept by the model.
    """

    name = "spot check"
    is_compared = False
    augments = True
    loads_ahead = False  # each worker loads the rows twice

    sent = (*Job.sent, "ticket", "closer")

    ticket: Ticket
    closer: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ticket = (self.ticket[0], self.ticket[1])  # in a message it is a list

    def compute(self, replica: Replica, stream: Stream, feed: Feed, task: Task) -> ShardSum:  # noqa: ARG002
        """Load and compute the shard twice. Blocks; called in the thread of the worker."""
        result = self._result(replica, stream, msgspec.structs.replace(task, into=None))
        output = Piece(*self.ticket, asdict(result))
        return ShardSum(weight=1.0, metrics={"loss": 0.0}, outputs=[output])

    def _work(self, replica: Replica, batch: Batch, stream: Stream, task: Task) -> ShardSum:
        raise NotImplementedError  # ``compute`` does everything

    def _result(self, replica: Replica, stream: Stream, task: Task) -> SpotCheckResult:
        # 1. Compare the rows.
        first, again = (self.source.load(self.ticket) for _ in range(2))
        data, data_again = (fingerprint(batch.data) for batch in (first, again))
        replica.pull(self.parameters, version=(self, 0))
        replica.loss_call.place(self.plan, self.ticket[0], first.rows)
        if data != data_again:
            return SpotCheckResult(data, "", [self._doubt_of_rows()])
        if text := self._doubt_of_trained_rows(replica):
            return SpotCheckResult(data, "", [text])
        # 2. Compute through the stages. The stages come first, because stage processes have copies
        # of the rows, and user code may write to the rows.
        through = []
        if isinstance(replica, PipelinedReplica):
            for batch in (first, again):
                (computed,) = self._in_stages(replica, stream, [task], [batch])
                through.append(result_of(computed))
                replica.recycle(computed)
        # 3. Compute in one piece. The vector for the gradient is freed afterwards; later shards of
        # a worker process need only the vector of a slot.
        seed = shard_seed(self.plan, *self.ticket)
        shards = [ShardArgs(batch.data, len(batch.rows), stream, seed) for batch in (first, again)]
        into = self.parameters.layout.gradients.new(CPU) if replica.device == CPU else None
        # A tower may still compute a shard that was cancelled, and write to common objects.
        with replica.alone.turns.held():
            once, twice = (_computed(replica, shard, task, into) for shard in shards)
            found = doubts(replica, once, twice, shards[0])
        result = SpotCheckResult(data, twice.result, found)
        if through:
            found = [*found, *_doubts_of_stages(through, twice.result, has_doubts=bool(found))]
            result = replace(result, result=through[-1], doubts=found)
        return self._looked_closer(replica, shards[0], result) if self.closer else result

    def _looked_closer(
        self, replica: Replica, shard: ShardArgs, result: SpotCheckResult
    ) -> SpotCheckResult:
        with ModuleTrace(replica.model) as trace, replica.watched(trace.watch):
            total = replica.gradient(shard.data, shard.rows, shard.stream, shard.seed)
        assert total.gradient is not None
        gradient = {name: tensor_text(view) for name, view in total.gradient.named.items()}
        replica.recycle(total)
        now_kept = kept(replica.model, replica.loss_call.loss)
        return replace(result, forward=trace.forward, gradient=gradient, kept=now_kept)

    def _doubt_of_rows(self) -> str:
        """Return a warning: the rows, or batches of equal rows, differ after a second load."""
        source = self.source.hashing()
        first, again = source.load(self.ticket), source.load(self.ticket)
        if first.samples == again.samples and not self.source.has_defaults:
            return (
                "collate or augment makes a different batch of the same rows each time: the "
                "function draws from its own generator, reads the clock, or counts its calls"
            )
        return self._doubt_of_dataset("each time a row is loaded", abridged(first.rows))

    def _doubt_of_trained_rows(self, replica: Replica) -> str | None:
        """Return a warning if rows of an earlier training shard have changed; else None.

        Rows of a stream are not compared: the stream would have to start again.
        """
        given, source = replica.witness.given, self.source
        if given is None or not given.is_of(source) or isinstance(source.dataset, RowStream):
            return None
        again = source.load(given.ticket)
        if fingerprint(again.data) == given.text:
            return None
        return self._doubt_of_dataset("when the same rows are loaded again", abridged(again.rows))

    def _doubt_of_dataset(self, when: str, rows: str) -> str:
        who = f"the dataset ({type(self.source.dataset).__name__})"
        who += " gives" if self.source.has_defaults else ", or its collate or augment, gives"
        return (
            f"{who} different values {when} (rows {rows}): the code draws from its own generator, "
            "reads the clock, counts its calls, or changes the data that it holds"
        )


def _doubts_of_stages(through: Sequence[str], whole: str, *, has_doubts: bool) -> list[str]:
    """Return warnings about the results of a replica in stages.

    Args:
        through: fingerprint of each computation through the stages.
        whole: fingerprint of the computation in one piece.
        has_doubts: whether there are warnings about the computations in one piece.
    """
    if len({*through}) > 1:
        return [
            "the same shard gives different results each time through the stages: a stage reads "
            "the clock, or keeps state in its process or thread that no checkpoint saves"
        ]
    if not has_doubts and through[-1] != whole:
        return [
            "the same shard gives a different result through the stages than in one piece: a "
            "module or the loss depends on the process or the thread that computes it"
        ]
    return []


def _computed(replica: Replica, shard: ShardArgs, task: Task, into: Flat | None) -> Computed:
    before = kept(replica.model, replica.loss_call.loss)
    computed = replica.gradient(
        shard.data, shard.rows, shard.stream, shard.seed, into=into, at=task.at
    )
    result = result_of(computed)
    if into is None:
        replica.recycle(computed)
    return Computed(result, before, kept(replica.model, replica.loss_call.loss))


# --- the coordinator ------------------------------------------------------------------------------

# Has workers compute a job, and returns their results by worker. The float limits the seconds
# until the first result.
Ask = Callable[[SpotCheck, float], Mapping[int, SpotCheckResult]]


def ask_workers(
    transport: Transport, workers: int, job: SpotCheck, patience_s: float
) -> dict[int, SpotCheckResult]:
    """Return the results of all workers that are present and answer in time. Blocks.

    Args:
        workers: number of workers of the transport.
        patience_s: how long the first result may take.
    """
    begun = time.monotonic()
    first_s: float | None = None  # time until the first result
    computing: set[int] = set()
    results: dict[int, SpotCheckResult] = {}
    without_result = 0  # workers
    with closing(transport.open(job)) as channel:
        while len(results) + without_result < workers:
            limit_s = SPOT_CHECK_JOIN_S
            if computing:
                limit_s = patience_s if first_s is None else max(SPOT_CHECK_ANSWER_S, 4 * first_s)
            left_s = begun + limit_s - time.monotonic()
            if left_s <= 0:
                break
            match channel.receive(left_s):
                case protocol.Joined(worker):
                    computing.add(worker)
                    channel.send(protocol.Compute(worker, *job.ticket, "spot check"))
                case protocol.Done(worker, step, shard):
                    computing.discard(worker)
                    channel.send(protocol.Keep(worker, step, shard))
                    for _, total in channel.collect(step, [worker]):
                        (output,) = total.outputs
                        results[worker] = msgspec.convert(output.value, SpotCheckResult)
                    channel.publish()
                    first_s = first_s or time.monotonic() - begun
                # An exception of user code is reported when the training computes the shard.
                case protocol.Failed(worker) | protocol.Cancelled(worker) | protocol.Left(worker):
                    computing.discard(worker)
                    without_result += 1
        for worker in computing:
            channel.send(protocol.Cancel(worker, *job.ticket))
    return results


@dataclass
class SpotChecks:
    """The spot checks of one training loop.

    Args:
        ask: has the workers of the loop compute a spot check.
        computed: the loop's source and parameters, and the number of intra-op threads.
        every: updates between two checks; None: the checks take 0.5% of the time. 0: no checks.
        notes: receives the warnings.
        model_and_loss: observed around user code, as often as there are checks.
        alone: whether only user code uses the model in this process.
    """

    ask: Ask
    computed: tuple[Source, Flat, int]
    every: int | None
    notes: Notes
    model_and_loss: InitVar[tuple[torch.nn.Module, Loss]]
    alone: InitVar[bool]
    made: int = field(default=0, init=False)
    _has_checked: bool = field(default=False, init=False)
    _updates: int = field(default=0, init=False)
    _left: int = field(default=MOST_FINDINGS, init=False)
    _due_at: float = field(default=0.0, init=False)  # of the monotonic clock

    def __post_init__(self, model_and_loss: tuple[torch.nn.Module, Loss], alone: bool) -> None:
        self._outside = OutsideChecks(*model_and_loss, self.notes, alone=alone)

    def updated(self, step: int, patience_s: float) -> None:
        """Count an update, and make a spot check if a check is due. Blocks during the check.

        Args:
            step: the next step.
            patience_s: how long the first result may take.
        """
        self._updates += 1
        self._has_checked = False
        begun = time.monotonic()
        if self.every is None:
            is_due = begun >= self._due_at
        else:
            is_due = self.every > 0 and (self._updates - 1) % self.every == 0
        if is_due and self._left:
            self._has_checked = True
            self._left -= not self._check(step, patience_s)
            now = time.monotonic()
            self._due_at = now + (now - begun) * (1 / SHARE - 1)

    def looking(self) -> AbstractContextManager[None]:
        """Observe the user code run in the block, if a check was made before the block."""
        return self._outside.looking() if self._has_checked else _NOTHING

    def _check(self, step: int, patience_s: float) -> bool:
        """Make a spot check. Return True without any finding."""
        source, parameters, threads = self.computed
        ticket = (step, self.made % source.plan.shards_of(step))
        self.made += 1
        for closer in (False, True):
            job = SpotCheck(
                source, parameters, range(0), ticket=ticket, closer=closer, threads=threads
            )
            results = self.ask(job, patience_s)
            own_doubts = [doubt for _, each in sorted(results.items()) for doubt in each.doubts]
            for doubt in own_doubts:
                self.notes.doubt(doubt)
            if own_doubts:
                return False
            if closer:
                self.notes.doubt(_first_difference(results))
            elif not _differ(results):
                return True
        return False


def _differ(results: Mapping[int, SpotCheckResult]) -> bool:
    return len({(each.data, each.result) for each in results.values()}) > 1


def _first_difference(results: Mapping[int, SpotCheckResult]) -> str:
    """Return the first difference between the results of two workers, in words."""
    if not _differ(results):
        return (
            "two workers gave different results for the same shard, and equal results the second "
            "time: the code changes an object that workers share while a shard is computed"
        )
    numbers = sorted(results)
    first = results[numbers[0]]
    number, other = next(
        (n, results[n])
        for n in numbers
        if (results[n].data, results[n].result) != (first.data, first.result)
    )
    who = f"workers {numbers[0]} and {number}"
    if first.data != other.data:
        return f"{who} have different rows: the dataset holds different data on the two workers"
    if names := changed(first.kept, other.kept):
        text = f"{who} give different results for the same shard, and have different values of "
        return text + ", ".join(names[:4])
    for mine, theirs in zip(first.forward, other.forward, strict=False):
        if (mine.what, mine.path) != (theirs.what, theirs.path):
            module = module_text(theirs.path, theirs.kind)
            return f"{who} call different modules in the same shard: {module}"
        if mine.hash != theirs.hash:
            did = "return different values" if mine.what == "out" else "receive different inputs"
            module = module_text(mine.path, mine.kind)
            return f"{who} give different results for the same shard: {module} is first to {did}"
    names = [name for name, text in first.gradient.items() if other.gradient.get(name) != text]
    of = f"the gradient of {names[0]}" if names else "the loss"
    return f"{who} give different results for the same shard: {of} differs, module outputs do not"
