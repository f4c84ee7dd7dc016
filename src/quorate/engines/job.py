"""Jobs: the work for workers. Training shards produce gradients, evaluation shards metrics."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from quorate.coordination.keys import key
from quorate.coordination.plan import Plan, abridged
from quorate.data.feed import CPU, Feed
from quorate.data.loader_processes import Told, nobody_told
from quorate.data.source import Batch, Source, Ticket
from quorate.engines.amendments import Amendments
from quorate.engines.drawing import drawing as drawing
from quorate.engines.remote_error import exited
from quorate.engines.stages.pipelined_replica import PipelinedReplica
from quorate.engines.stages.shard_input import ShardInput, ShardRows, no_stage
from quorate.engines.tracing import current
from quorate.machine import out_of_memory
from quorate.machine.signal_handlers import LeftError
from quorate.replica.flat import Flat
from quorate.replica.outputs.rows import Piece
from quorate.replica.replica import Phase, Replica, no_phase
from quorate.replica.shard_sum import ShardSum
from quorate.replica.snapshots import Snapshot
from quorate.replica.streams import Stream
from quorate.replica.whole_batch.represented import Tensors


class NotWanted(BaseException):
    """The shard that is being computed is not wanted any more. Only between two phases."""


class Task(NamedTuple):
    """One shard for one worker to compute."""

    worker: int
    step: int
    shard: int
    into: Flat | None = None  # where the gradient is written; None: a vector of the replica's own
    at: Phase = no_phase  # told the name of each phase when it begins; it may raise NotWanted
    beside: Tensors | None = None  # see ``Job.beside``; None: it is the job's own to know
    waits_for: Callable[[int], None] = no_stage  # told a stage of the replica that takes long


class Original(NamedTuple):
    """The coordinator's model, which replicas are kept like."""

    amendments: Callable[[], Amendments]  # as they are now
    frozen: Callable[[], Mapping[str, torch.Tensor]]  # the values of what is not trained
    changes: Callable[[], int]  # another number if what is no trained parameter and no buffer is


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
    """

    name: str
    is_compared = True  # whether workers that do not compute the same are refused at the start
    augments = False  # whether its rows are augmented
    is_again = False  # whether it interrupts another that computes gradients too
    has_own_steps = False  # whether its steps are those of an evaluation, and not of training
    is_shown = False  # whether it computes from what that one has shown to workers

    def __init__(
        self,
        source: Source,
        parameters: Flat,
        steps: range,
        *,
        on_snapshots: bool = False,
        loader_workers: int = 0,
        threads: int = 1,
    ) -> None:
        self.source = source
        self.plan = source.plan
        self.parameters = parameters
        self.steps = steps
        self.on_snapshots = on_snapshots
        self.loading = {"loader_workers": loader_workers, "threads": threads}
        self.trace = current()  # takes what workers were at; None: nobody wants it

    def options(self) -> dict[str, Any]:
        """Return the values from which a worker process can construct the same job.

        Data and parameters are not included.
        """
        return self.loading

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
        # Two steps' worth: a step's shards are taken in any order, and the next one's are loaded
        # meanwhile.
        return Feed(
            self.source,
            tickets,
            ahead=max(2, 2 * len(self.home_shards(rank_of, self.steps.start))),
            # One worker takes its own in order; several that share a feed, only about so.
            behind=self.plan.lookahead - 1 if rank_of == (0, 1) else 0,
            covers=covers,
            moves_to=moves_to,
            told=told,
            **self.loading,
        )

    def home_shards(self, rank_of: tuple[int, int], step: int) -> range:
        """Return the shards of a step that a worker computes in an undisturbed run."""
        return self.plan.home_shards(rank_of, step)

    def compute(
        self,
        replica: Replica,
        stream: Stream,
        feed: Feed,
        task: Task,
        *,
        snapshot: Snapshot | None = None,
        is_only: bool = False,
    ) -> ShardSum:
        """Compute one shard on a replica. Blocks; called in the thread of the worker.

        Args:
            feed: a feed of this job.
            snapshot: parameters to compute with. Default: the current ``parameters``.
            is_only: whether no other worker takes from the feed. If so, the next rows are moved to
                the device during the computation.

        Raises:
            ExitError: user code called ``sys.exit()``.
            Any exception of user code.
        """
        batch = self._fetched(replica, feed, task, is_only=is_only)
        return self._computed(replica, stream, batch, task, snapshot)

    def compute_run(
        self,
        replica: Replica,
        stream: Stream,
        feed: Feed,
        tasks: Sequence[Task],
        *,
        snapshot: Snapshot | None = None,
        is_only: bool = False,
    ) -> list[ShardSum]:
        """Compute several shards of a step one after the other, as ``compute`` does.

        State that a process has only once is checked before the first and after the last shard.
        """
        if len(tasks) > 1:
            tasks[0].at("fetching")
            try:
                batches = feed.take_run([(task.step, task.shard) for task in tasks])
            except SystemExit as error:
                raise _exited(error, self, tasks[0]) from error
            # Without a turn: what loads rows may have to wait for its own.
            together = replica.alone.together(
                lambda: [
                    self._computed(replica, stream, batch, task, snapshot)
                    for task, batch in zip(tasks, batches, strict=True)
                ]
            )
            if together is not None:
                return together[0]
        how: Any = {"snapshot": snapshot, "is_only": is_only}
        return [self.compute(replica, stream, feed, task, **how) for task in tasks]

    def _fetched(self, replica: Replica, feed: Feed, task: Task, *, is_only: bool = False) -> Batch:
        task.at("fetching")
        ticket = (task.step, task.shard)
        try:
            batch = feed.take(ticket)
        except SystemExit as error:
            raise _exited(error, self, task) from error
        replica.transfers.begin(batch.data)
        if is_only and (following := feed.following(ticket)) is not None:
            replica.transfers.begin(following.data)
        return batch

    def _computed(
        self,
        replica: Replica,
        stream: Stream,
        batch: Batch,
        task: Task,
        snapshot: Snapshot | None,
    ) -> ShardSum:
        self._pulled(replica, task, snapshot)
        replica.called.place(self.plan, task.step, batch.rows)
        try:
            return self._work(replica, batch, stream, task)
        except SystemExit as error:
            raise _exited(error, self, task) from error

    def _pulled(self, replica: Replica, task: Task, snapshot: Snapshot | None) -> None:
        if snapshot is None:
            replica.pull(self.parameters, version=self.version(task))
        else:
            values = snapshot.values
            replica.pull(values.flat, (self, snapshot.version), set_buffers=values.set)

    def version(self, task: Task) -> object:
        """Return a version of the parameters, to compare with the version of a copy."""
        # Within a step parameters do not change; a job that ended leaves others behind.
        return self, task.step

    def ticket(self, step: int, shard: int) -> Ticket:
        """Return step and shard of the rows of a task, for messages."""
        return step, shard

    def has_gradients(self, step: int) -> bool:  # noqa: ARG002
        """Return whether the shards of a step produce gradients, which need memory."""
        return False

    def beside(self, step: int, shard: int) -> Tensors | None:  # noqa: ARG002
        """Return the inputs of a shard besides rows and parameters, in the coordinator."""
        return None

    def place(self, step: int, shard: int) -> str:
        """Return in words which shard is meant; see ``place``."""
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
    """Return a shard in words: ``step 7, shard 3``, or ``validation, batch 2, shard 0``.

    Only a step of training is called a step: an evaluation has batches, counted by themselves.

    Args:
        job: what the shard is for; the ``name`` of a job, or a closer word for it.
    """
    if job != Training.name:
        return f"{job}, batch {step}, shard {shard}"
    return f"step {step}{'' if phase is None else f' (phase {phase})'}, shard {shard}"


def _exited(error: SystemExit, job: Job, task: Task) -> BaseException:
    """Return what an end of the program is in a shard: the user's code must not ask for it."""
    if isinstance(error, LeftError):
        return error
    return exited(error, f"worker {task.worker}, {job.place(task.step, task.shard)}")


def class_name(job: Job) -> str:
    """Return the name by which ``class_of`` finds the job's class in another process."""
    kind = type(job)
    return f"{kind.__module__}:{kind.__qualname__}"


def class_of(name: str) -> type[Job]:
    """Import the class of a job, from a module of this package.

    So a transport knows no job but the two here, and whoever uses it may bring others.

    Raises:
        ValueError: there is no such job.
    """
    module, _, attribute = name.partition(":")
    if module.partition(".")[0] != __name__.partition(".")[0]:
        raise ValueError(f"a job's class: got {name!r}, expected one of a module of quorate")
    kind: object = getattr(importlib.import_module(module), attribute, None)
    if not (isinstance(kind, type) and issubclass(kind, Job)):
        raise ValueError(f"a job's class: got {name!r}, expected a subclass of Job")
    return kind


def shard_seed(plan: Plan, step: int, shard: int) -> int:
    """Return the seed of a training shard's random stream."""
    return key(*_seed_of(plan, step, shard))


def _seed_of(plan: Plan, step: int, shard: int) -> tuple[int | str, ...]:
    return "shard", plan.seed, step, shard


class Training(Job):
    """A job that computes gradients of the loss, shard by shard."""

    name = "training"
    augments = True
    in_one_piece = False  # whether a replica in stages computes shards without them, too

    def has_gradients(self, step: int) -> bool:  # noqa: ARG002
        """Return True: every training shard produces a gradient."""
        return True

    def compute_run(
        self, replica: Replica, stream: Stream, feed: Feed, tasks: Sequence[Task], **how: Any
    ) -> list[ShardSum]:
        """Compute shards of one step; all at the same time if the replica has stages."""
        if not isinstance(replica, PipelinedReplica) or self.in_one_piece:
            return super().compute_run(replica, stream, feed, tasks, **how)
        batches = [self._fetched(replica, feed, task) for task in tasks]
        self._pulled(replica, tasks[0], how["snapshot"])
        return self._in_stages(replica, stream, tasks, batches)

    def _in_stages(
        self,
        replica: PipelinedReplica,
        stream: Stream,
        tasks: Sequence[Task],
        batches: Sequence[Batch],
    ) -> list[ShardSum]:
        """Have the shards of a run flow through the stages; the replica has the parameters.

        Returns:
            What ``PipelinedReplica.gradients`` returns.
        """
        step, given = tasks[0].step, []
        for b, t in zip(batches, tasks, strict=True):
            replica.called.place(self.plan, step, b.rows)
            rows = ShardRows(b.data, replica.called.at)
            seed = shard_seed(self.plan, step, t.shard)
            given.append(ShardInput(t.shard, rows, len(b.rows), seed, t.into, t.at, t.waits_for))
        return replica.gradients(given, stream, self.plan.shards_of(step))

    def _work(self, replica: Replica, batch: Batch, stream: Stream, task: Task) -> ShardSum:
        rows = len(batch.rows)
        replica.witness.take_given(self.source, (task.step, task.shard), batch.data)
        return replica.gradient(
            batch.data,
            rows,
            stream,
            _seed_of(self.plan, task.step, task.shard),
            into=task.into,
            at=task.at,
            reload=partial(self._reloaded, task),
        )


class TrainingAgain(Training):
    """A step of the training loop once more, at other parameters, while its update is made.

    What the loop has collected of it stays where it is meanwhile.
    """

    is_again = True


class Evaluation(Job):
    """Metrics of the loss function in evaluation mode."""

    name = "evaluation"
    has_own_steps = True

    def _work(self, replica: Replica, batch: Batch, stream: Stream, task: Task) -> ShardSum:
        task.at("forward")
        seed = key("evaluation", self.plan.seed, task.step, task.shard)
        reload = partial(self._reloaded, task)
        total = replica.evaluation(batch.data, len(batch.rows), stream, seed, reload=reload)
        total.outputs = [Piece(task.step, task.shard, value) for _, _, value in total.outputs]
        return total
