"""Jobs: the work for workers. Training shards produce gradients, evaluation shards metrics."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import msgspec
import torch
from msgspec.structs import replace

from quorate.coordination.keys import key
from quorate.coordination.plan import Plan, abridged
from quorate.data.feed import CPU, Feed
from quorate.data.loader_processes import Told, nobody_told
from quorate.data.source import Batch, Source, Ticket
from quorate.engines.model_changes import ModelChanges
from quorate.engines.stages.pipelined_replica import PipelinedReplica
from quorate.engines.stages.stage_runner import MicroBatch, ShardInput, no_stage
from quorate.engines.tracing import Trace, current
from quorate.machine import out_of_memory
from quorate.replica.fingerprint import fingerprint
from quorate.replica.flat import Flat
from quorate.replica.loss_terms import Scales
from quorate.replica.outputs.rows import Piece
from quorate.replica.replica import Phase, Replica, no_phase
from quorate.replica.shard_sum import ShardSum
from quorate.replica.snapshots import Snapshot
from quorate.replica.streams import Stream
from quorate.replica.whole_batch.represented import Tensors


class NotWanted(BaseException):
    """Raised between two phases of a shard: the coordinator cancelled the shard."""


class Task(msgspec.Struct, eq=False):
    """A shard for a worker to compute."""

    worker: int
    step: int
    shard: int
    into: Flat | None = None  # gets the gradient; None: a vector of the replica gets the gradient
    at: Phase = no_phase  # receives the name of each phase at the start; may raise NotWanted
    beside: Tensors | None = None  # see ``Job.beside``; None: the job has the tensors
    waits_for: Callable[[int], None] = no_stage  # receives a pipeline stage that takes long
    snapshot: Snapshot | None = None  # parameters to compute with; None: those of the job
    # Whether no other worker takes rows from the feed. If so, the next rows are moved to the device
    # during the computation.
    is_only: bool = False


class OriginalModel(NamedTuple):
    """The coordinator's model, which replicas copy."""

    model_changes: Callable[[], ModelChanges]  # returns the present ones
    frozen: Callable[[], Mapping[str, torch.Tensor]]  # returns the values of frozen parameters
    changes: Callable[[], int]  # a number for everything but trained parameters and buffers


@dataclass(eq=False)
class Job(ABC):
    """One pass over data, divided into steps and shards.

    Args:
        source: loads the rows of a shard.
        parameters: the coordinator's parameters, plain or averaged, to compute with.
        steps: the steps of the plan to compute.
        on_snapshots: whether updates are made while shards are computed, so that each shard is
            computed from a snapshot of the parameters.
        loader_workers: number of processes that load rows.
        threads: intra-op threads for loading and for computing.
        owned: returns the shards of a step that this process alone computes. Default: shards are
            dealt by the plan, for an undisturbed run.
    """

    name: ClassVar[str]
    is_compared = True  # whether workers with different results are refused at the start
    augments = False  # whether rows are augmented
    loads_ahead = True  # whether rows are loaded before a worker takes the rows
    interrupts_training = False  # whether the job computes gradients during a training's update
    has_own_steps = False  # whether the steps are batches of an evaluation instead of updates
    reuses_published_buffers = False  # whether buffers of the interrupted training are used
    sent: ClassVar[Sequence[str]] = ("loader_workers", "threads")  # the fields of ``options``

    source: Source
    parameters: Flat
    steps: range
    _: KW_ONLY
    on_snapshots: bool = False
    loader_workers: int = 0
    threads: int = 1
    owned: Callable[[int], range] | None = None

    def __post_init__(self) -> None:
        self.plan = self.source.plan
        self.trace_to(current())

    def trace_to(self, trace: Trace | None) -> None:
        """Let a trace receive the workers' spans; call before the job is opened. None: no trace."""
        self.trace = trace
        self.traced = range(0) if trace is None else trace.steps_of(self)

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments to construct the same job in a worker process.

        Data and parameters are not included.
        """
        return {name: getattr(self, name) for name in self.sent}

    def feed(
        self,
        rank_of: tuple[int, int] = (0, 1),
        first: Ticket = (0, 0),
        moves_to: torch.device = CPU,
        told: Told = nobody_told,
    ) -> Feed:
        """Return the prefetched rows of a worker's home shards; by default, of all shards.

        Args:
            rank_of: rank of the worker, and number of workers.
            first: step and shard to begin with.
            moves_to: device that the rows will be moved to.
            told: receives the status of the prefetching.
        """
        if not self.loads_ahead:
            return Feed(self.source, (), ahead=1, threads=self.threads)

        def covers(ticket: Ticket) -> bool:
            step, shard = ticket
            return (
                shard in self.home_shards(rank_of, step) and step in self.steps and ticket >= first
            )

        tickets = (
            (step, shard)
            for step in range(max(first[0], self.steps.start), self.steps.stop)
            for shard in self.home_shards(rank_of, step)
            if (step, shard) >= first
        )
        # Two steps ahead: the shards of a step are taken in any order, while the shards of the next
        # step are loaded.
        return Feed(
            self.source,
            tickets,
            ahead=max(2, 2 * len(self.home_shards(rank_of, self.steps.start))),
            # A worker takes shards from its feed in order; several workers of a feed, nearly so.
            behind=self.plan.lookahead - 1 if rank_of == (0, 1) else 0,
            covers=covers,
            moves_to=moves_to,
            told=told,
            loader_workers=self.loader_workers,
            threads=self.threads,
        )

    def home_shards(self, rank_of: tuple[int, int], step: int) -> range:
        """Return the shards of a step that a worker computes in an undisturbed run."""
        return self.plan.home_shards(rank_of, step) if self.owned is None else self.owned(step)

    def compute(self, replica: Replica, stream: Stream, feed: Feed, task: Task) -> ShardSum:
        """Compute a shard on a replica. Blocks; called in the thread of the worker.

        The phase "fetching" has begun.

        Args:
            feed: a feed of this job.

        Raises:
            Any exception of user code, a SystemExit too.
        """
        return self._computed(replica, stream, self._fetched(replica, feed, task), task)

    def compute_run(
        self, replica: Replica, stream: Stream, feed: Feed, tasks: Sequence[Task]
    ) -> list[ShardSum]:
        """Compute several shards of a step one after the other, as ``compute`` does.

        State of the whole process is checked before the first and after the last shard.
        """
        if len(tasks) > 1:
            batches = feed.take_run([(task.step, task.shard) for task in tasks])
            # Rows are loaded before: the loader may have to wait for an exclusive section.
            together = replica.alone.together(
                lambda: [
                    self._computed(replica, stream, batch, task)
                    for task, batch in zip(tasks, batches, strict=True)
                ]
            )
            if together is not None:
                return together[0]
        results = [self.compute(replica, stream, feed, tasks[0])]
        for task in tasks[1:]:
            task.at("fetching")
            results.append(self.compute(replica, stream, feed, task))
        return results

    def _fetched(self, replica: Replica, feed: Feed, task: Task) -> Batch:
        ticket = (task.step, task.shard)
        batch = feed.take(ticket)
        replica.transfers.begin(batch.data)
        if task.is_only and (following := feed.following(ticket)) is not None:
            replica.transfers.begin(following.data)
        return batch

    def _computed(self, replica: Replica, stream: Stream, batch: Batch, task: Task) -> ShardSum:
        self._pull(replica, task)
        replica.loss_call.place(self.plan, task.step, batch.rows)
        return self._work(replica, batch, stream, task)

    def _in_stages(
        self,
        replica: PipelinedReplica,
        stream: Stream,
        tasks: Sequence[Task],
        batches: Sequence[Batch],
    ) -> list[ShardSum]:
        """Compute the shards of a run in the stages; the replica has the parameters.

        Returns:
            The result of ``PipelinedReplica.gradients``.
        """
        step, given = tasks[0].step, []
        for b, t in zip(batches, tasks, strict=True):
            replica.loss_call.place(self.plan, step, b.rows)
            seed = shard_seed(self.plan, step, t.shard)
            rows = MicroBatch(b.data, replica.loss_call.at, len(b.rows), seed, self.scales_of(step))
            given.append(ShardInput(t.shard, rows, t.into, t.at, t.waits_for))
        return replica.gradients(given, stream, self.plan.shards_of(step))

    def _pull(self, replica: Replica, task: Task) -> None:
        """Give a replica the parameters of a task."""
        if task.snapshot is None:
            replica.pull(self.parameters, version=self.version(task))
        else:
            values = task.snapshot.values
            replica.pull(values.flat, (self, task.snapshot.version), set_buffers=values.set)

    def version(self, task: Task) -> object:
        """Return a version of the parameters, to compare with the version of a copy."""
        # Parameters are constant within a step; an earlier job has left different parameters.
        return self, task.step

    def has_gradients(self, step: int) -> bool:  # noqa: ARG002
        """Return whether the shards of a step produce gradients, which need memory."""
        return False

    def scales_of(self, step: int) -> Scales | None:  # noqa: ARG002
        """Return the scales of terms of the loss in a step; None: each shard is a whole batch."""
        return None

    def beside(self, step: int, shard: int) -> Tensors | None:  # noqa: ARG002
        """Return the inputs of a shard besides rows and parameters, in the coordinator."""
        return None

    def place(self, step: int, shard: int) -> str:
        """Return the position of a shard in words; see ``place``."""
        if self.has_own_steps:
            return place(self.name, step, shard)
        return place(Training.name, step, shard, self.plan.phase(step))

    def annotate(self, error: BaseException, task: Task, device: torch.device) -> None:
        """Add step, shard, worker and device to an exception raised in a shard."""
        rows = self.plan.shard(task.step, task.shard)
        if len(rows) == 1:
            error.add_note("quorate: a shard of one row; BatchNorm needs more: fewer shards")
        where = self.place(task.step, task.shard)
        error.add_note(f"quorate: worker {task.worker} ({device}), {where}, rows {abridged(rows)}")
        nbytes = self.parameters.layout.nbytes
        text = out_of_memory.note(error, device, shards=self.plan.shards, parameter_bytes=nbytes)
        if text is not None:
            error.add_note(text)

    def _reloaded(self, task: Task) -> Any:
        """Load a task's batch once more: user code has written the first one."""
        return self.source.load((task.step, task.shard)).data

    @abstractmethod
    def _work(self, replica: Replica, batch: Batch, stream: Stream, task: Task) -> ShardSum:
        """Compute the rows that were fetched; the replica has the parameters."""


def place(job: str, step: int, shard: int, phase: str | None = None) -> str:
    """Return the position of a shard: ``step 7, shard 3``, or ``validation, batch 2, shard 0``.

    Only a training has steps: an evaluation has batches with numbers of their own.

    Args:
        job: the ``name`` of a job, or a more precise word: "validation".
    """
    if job != Training.name:
        return f"{job}, batch {step}, shard {shard}"
    return f"step {step}{'' if phase is None else f' (phase {phase})'}, shard {shard}"


def class_name(kind: type) -> str:
    """Return a name of a class, from which ``class_of`` finds the class in another process."""
    return f"{kind.__module__}:{kind.__qualname__}"


def class_of(name: str, base: type) -> Any:
    """Import a class from a module of this package, by the ``class_name`` of the class.

    Engines import the jobs of higher layers in this way.

    Raises:
        ValueError: no subclass of ``base`` has the name.
    """
    module, _, attribute = name.partition(":")
    kind: object = None
    if module.partition(".")[0] == __name__.partition(".")[0]:
        kind = getattr(importlib.import_module(module), attribute, None)
    if not (isinstance(kind, type) and issubclass(kind, base)):
        raise ValueError(f"got {name!r}, expected a subclass of {base.__name__} of quorate")
    return kind


def shard_seed(plan: Plan, step: int, shard: int) -> int:
    """Return the seed of a training shard's random stream."""
    return key(*_seed_of(plan, step, shard))


def _seed_of(plan: Plan, step: int, shard: int) -> tuple[int | str, ...]:
    return "shard", plan.seed, step, shard


def data_fingerprint(source: Source) -> str:
    """Return a hash over the rows of shard 0 of step 0, equal in processes with the same data."""
    return fingerprint(source.load((0, 0)).data)


def probe_fingerprint(replica: Replica, source: Source, stream: Stream) -> str:
    """Return a hash over the sums of shard 0 of step 0, equal in processes with the same model."""
    batch = source.load((0, 0))
    seed = key("probe", source.plan.seed)
    replica.loss_call.place(source.plan, 0, batch.rows, of_phase=False)
    result = replica.gradient(batch.data, len(batch.rows), stream, seed)
    assert result.gradient is not None
    gradient = (result.gradient.vectors, result.gradient.rows)
    return fingerprint(
        (result.weight, result.metrics, *gradient, result.buffers, result.integer_buffers)
    )


class Training(Job):
    """A job that computes gradients of the loss, shard by shard."""

    name = "training"
    augments = True
    in_one_piece = False  # whether a replica in stages computes shards without the stages

    def has_gradients(self, step: int) -> bool:  # noqa: ARG002
        """Return True: every training shard produces a gradient."""
        return True

    def compute_run(
        self, replica: Replica, stream: Stream, feed: Feed, tasks: Sequence[Task]
    ) -> list[ShardSum]:
        """Compute shards of one step; all at the same time if the replica has stages."""
        if not isinstance(replica, PipelinedReplica) or self.in_one_piece:
            return super().compute_run(replica, stream, feed, tasks)
        batches = []
        for task in tasks:
            task.at("fetching")
            batches.append(self._fetched(replica, feed, replace(task, is_only=False)))
        self._pull(replica, tasks[0])
        return self._in_stages(replica, stream, tasks, batches)

    def scales_of(self, step: int) -> Scales | None:
        """Return unknown scales, unless the step has one shard."""
        return None if self.plan.shards_of(step) == 1 else {}

    def _work(self, replica: Replica, batch: Batch, stream: Stream, task: Task) -> ShardSum:
        rows, ticket = len(batch.rows), (task.step, task.shard)
        replica.witness.take_given(self.source, ticket, batch.data)
        return replica.gradient(
            batch.data,
            rows,
            stream,
            _seed_of(self.plan, task.step, task.shard),
            into=task.into,
            at=task.at,
            reload=partial(self._reloaded, task),
            scales=self.scales_of(task.step),
            keep=partial(replica.transfers.keep, ticket, batch),
        )


class TrainingAgain(Training):
    """A further pass over a step during the step's update, with different parameters.

    The sums collected in the first pass stay in place.
    """

    interrupts_training = True


class PassOverKeptRows(TrainingAgain):
    """A second pass over a step, with the rows, parameters and buffers of the first pass."""

    reuses_published_buffers = True
    loads_ahead = False  # a worker usually has a shard's rows from the first pass

    def _fetched(self, replica: Replica, feed: Feed, task: Task) -> Batch:
        kept: Batch | None = replica.transfers.kept.pop((task.step, task.shard), None)
        return kept or super()._fetched(replica, feed, task)


@dataclass(eq=False, kw_only=True)
class PassWithTotals(PassOverKeptRows):
    """A second pass with the totals of the terms of the loss."""

    sent = (*Job.sent, "scales")

    scales: dict[str, float]  # see ``loss_terms``

    def scales_of(self, step: int) -> Scales | None:  # noqa: ARG002
        """Return the scales of the terms."""
        return self.scales


class Evaluation(Job):
    """Metrics of the loss function in evaluation mode."""

    name = "evaluation"
    has_own_steps = True

    def _work(self, replica: Replica, batch: Batch, stream: Stream, task: Task) -> ShardSum:
        task.at("forward")
        seed = key(self.name, self.plan.seed, task.step, task.shard)
        reload = partial(self._reloaded, task)
        total = replica.evaluation(batch.data, len(batch.rows), stream, seed, reload=reload)
        total.outputs = [Piece(task.step, task.shard, value) for _, _, value in total.outputs]
        return total
