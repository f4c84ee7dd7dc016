"""A spot check: every worker computes one and the same shard, twice; all results have to be equal.

A replica in stages computes the shard twice through its stages, as in training, and twice in one
piece: all four results have to be equal, too.

It is a job of its own between two updates, from the parameters as they are. What it computes is
thrown away. What a worker has found goes to the coordinator as the output of the shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from quorate.coordination.plan import abridged
from quorate.data.feed import CPU, Feed
from quorate.data.source import Batch, Source, Ticket
from quorate.data.streams.stream import Stream as RowStream
from quorate.engines.job import Job, Task, shard_seed
from quorate.engines.stages.pipelined_replica import PipelinedReplica
from quorate.engines.stages.shard_input import ShardInput, ShardRows
from quorate.replica.fingerprint import fingerprint
from quorate.replica.flat import Flat
from quorate.replica.outputs.rows import Piece
from quorate.replica.replica import Replica
from quorate.replica.shard_sum import ShardSum
from quorate.replica.streams import Stream
from quorate.replica.witness.again import Computed, Shard, doubts, result_of
from quorate.replica.witness.kept import Kept, kept
from quorate.replica.witness.module_trace import Event, ModuleTrace
from quorate.replica.witness.values import tensor_text


@dataclass(frozen=True)
class Answer:
    """What one worker has found."""

    data: str  # fingerprint of the rows
    result: str  # fingerprint of what the shard gave
    doubts: list[str]  # of this worker alone
    forward: list[Event] = field(default_factory=list)  # if it was to look closer
    gradient: dict[str, str] = field(default_factory=dict)  # likewise, by parameter
    kept: Kept = field(default_factory=dict)  # likewise

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Answer:
        """Return the answer of these fields, as a message brings them."""
        return cls(**{**fields, "forward": [Event(**event) for event in fields["forward"]]})

    @classmethod
    def in_sum(cls, total: ShardSum) -> Answer:
        """Return the answer that a worker has handed over as the output of the shard."""
        (piece,) = total.outputs
        return cls.of(piece.value)


class SpotCheck(Job):
    """One shard, the same for all workers: which step and shard a task says does not count.

    Args:
        ticket: step and shard.
        closer: whether workers look closer: at what modules return, and what the model keeps.
    """

    name = "spot check"
    is_compared = False
    augments = True
    loads_ahead = False  # each worker loads the rows twice

    def __init__(
        self,
        source: Source,
        parameters: Flat,
        steps: range,
        *,
        ticket: Ticket,
        closer: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(source, parameters, steps, **options)
        self._ticket: Ticket = (ticket[0], ticket[1])
        self._closer = closer

    def options(self) -> dict[str, Any]:
        """Return what a worker process needs to make the same job."""
        return {**super().options(), "ticket": list(self._ticket), "closer": self._closer}

    def compute(self, replica: Replica, stream: Stream, feed: Feed, task: Task) -> ShardSum:  # noqa: ARG002
        """Load and compute the shard twice, through stages too if there are any.

        Blocks; called by the worker's own thread.
        """
        task.at("fetching")
        first, again = (self.source.load(self._ticket) for _ in range(2))
        found = [fingerprint(batch.data) for batch in (first, again)]
        replica.pull(self.parameters, version=(self, 0))
        replica.called.place(self.plan, self._ticket[0], first.rows)
        if found[0] != found[1]:
            return self._answer(Answer(found[0], "", [self._about_rows()]))
        if text := self._about_given(replica):
            return self._answer(Answer(found[0], "", [text]))
        seed = shard_seed(self.plan, *self._ticket)
        shards = [Shard(batch.data, len(batch.rows), stream, seed) for batch in (first, again)]
        # Stages first: their processes have copies of the rows, which user code may write.
        through = self._through(replica, stream, (first, again), task)
        # Memory of its own, which is free again: a worker process needs none but the slot's.
        into = self.parameters.layout.gradients.new(CPU) if replica.device == CPU else None
        once, twice = (_computed(replica, shard, task, into) for shard in shards)
        answer = Answer(found[0], twice.result, doubts(replica, once, twice, shards[0]))
        if through:
            answer = _answer_in_stages(answer, twice, through)
        if self._closer:
            answer = self._looked_closer(replica, shards[0], answer)
        return self._answer(answer)

    def _through(
        self, replica: Replica, stream: Stream, batches: Sequence[Batch], task: Task
    ) -> list[str]:
        """Return what the shard gives each time that it flows through the stages; [] without any.

        Training computes its shards so, and not in one piece.
        """
        if not isinstance(replica, PipelinedReplica):
            return []
        step, shard = self._ticket
        seed = shard_seed(self.plan, step, shard)
        results = []
        for batch in batches:
            rows = ShardRows(batch.data, replica.called.at)
            given = ShardInput(shard, rows, len(batch.rows), seed, None, task.at, task.waits_for)
            (computed,) = replica.gradients([given], stream, self.plan.shards_of(step))
            results.append(result_of(computed))
            replica.recycle(computed)
        return results

    def ticket(self, step: int, shard: int) -> Ticket:  # noqa: ARG002
        """Return step and shard of the rows that all compute."""
        return self._ticket

    def annotate(self, error: BaseException, task: Task, device: torch.device) -> None:
        """Add to what was raised which shard it was."""
        super().annotate(error, task._replace(step=self._ticket[0], shard=self._ticket[1]), device)

    def _work(self, replica: Replica, batch: Batch, stream: Stream, task: Task) -> ShardSum:
        raise NotImplementedError  # compute() does not ask for it

    def _answer(self, answer: Answer) -> ShardSum:
        return ShardSum(
            weight=1.0, metrics={"loss": 0.0}, outputs=[Piece(*self._ticket, asdict(answer))]
        )

    def _looked_closer(self, replica: Replica, shard: Shard, answer: Answer) -> Answer:
        with ModuleTrace(replica.model) as trace, replica.watched(trace.watch):
            result = replica.gradient(shard.data, shard.rows, shard.stream, shard.seed)
        assert result.gradient is not None
        gradient = {name: tensor_text(view) for name, view in result.gradient.named.items()}
        replica.recycle(result)
        return Answer(
            answer.data,
            answer.result,
            answer.doubts,
            trace.forward,
            gradient,
            kept(replica.model, replica.plain_loss),
        )

    def _about_rows(self) -> str:
        """Say which rows, or what is made of them, are others when they are loaded again."""
        source = self.source.hashing()
        first, again = source.load(self._ticket), source.load(self._ticket)
        pairs = zip(first.rows.tolist(), first.samples, again.samples, strict=True)
        rows = [row for row, text, changed in pairs if text != changed]
        if not rows and not self.source.has_defaults:
            return (
                "collate or augment makes a different batch of the same rows each time: the "
                "function draws from its own generator, reads the clock, or counts its calls"
            )
        return self._other_values("each time a row is loaded", abridged(first.rows))

    def _about_given(self, replica: Replica) -> str | None:
        """Say whether rows that training has had are others now; None: they are not.

        Not of a stream, which would have to begin anew.
        """
        given, source = replica.witness.given, self.source
        if given is None or not given.is_of(source) or isinstance(source.dataset, RowStream):
            return None
        again = source.load(given.ticket)
        if fingerprint(again.data) == given.text:
            return None
        when = "when the same rows are loaded again"
        return self._other_values(when, abridged(again.rows))

    def _other_values(self, when: str, rows: str) -> str:
        who = f"the dataset ({type(self.source.dataset).__name__})"
        who += " gives" if self.source.has_defaults else ", or its collate or augment, gives"
        return (
            f"{who} different values {when} (rows {rows}): the code draws from its own generator, "
            "reads the clock, counts its calls, or changes the data that it holds"
        )


def _answer_in_stages(answer: Answer, whole: Computed, through: Sequence[str]) -> Answer:
    """Return the answer of a replica in stages: what they gave is what counts.

    Args:
        answer: of the shard in one piece.
        whole: what the shard gave in one piece.
        through: what it gave each time that it flowed through the stages.
    """
    found = list(answer.doubts)
    if len({*through}) > 1:
        found.append(
            "the same shard gives different results each time through the stages: a stage reads "
            "the clock, or keeps state in its process or thread that no checkpoint saves"
        )
    elif not found and through[-1] != whole.result:
        found.append(
            "the same shard gives a different result through the stages than in one piece: a "
            "module or the loss depends on the process or the thread that computes it"
        )
    return replace(answer, result=through[-1], doubts=found)


def _computed(replica: Replica, shard: Shard, task: Task, into: Flat | None) -> Computed:
    before = kept(replica.model, replica.plain_loss)
    computed = replica.gradient(
        shard.data, shard.rows, shard.stream, shard.seed, into=into, at=task.at
    )
    result = result_of(computed)
    if into is None:
        replica.recycle(computed)
    return Computed(result, before, kept(replica.model, replica.plain_loss))
