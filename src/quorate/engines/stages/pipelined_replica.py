"""A pipelined replica: its model is cut into stages, and shards flow through them.

The replica itself computes whole shards as any other does, for evaluations and to compare. Shards
of a training step it deals to a process for each of its devices, a run at a time. What comes back
is, bit for bit, what it would have computed itself: the first shard is computed in both ways, and a
model for which that does not hold is refused.

Gradients of a run each stage adds up itself, its own part of them, in the order of the tree of
shards. So what is held of them is a few sums, however many shards there are.

Legend: p devices, S stages, V shards of a step, m shards of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from quorate.coordination.pipeline_schedules import SCHEDULES
from quorate.engines.stages.devices import StageDevices, StageProcesses
from quorate.engines.stages.gradient_pool import GradientPool, LentVectors
from quorate.engines.stages.links import GoneError
from quorate.engines.stages.shard_input import ShardInput
from quorate.engines.stages.stage_runner import Micro, Shared, failure
from quorate.engines.stages.staged_replica import StagedReplica
from quorate.engines.tracing import own_log
from quorate.errors import SettingError, WorkerError
from quorate.machine.devices import Group
from quorate.machine.limits import STAGE_POLL_S
from quorate.replica.fingerprint import fingerprint
from quorate.replica.flat import Flat
from quorate.replica.model import bind
from quorate.replica.pipeline.buffers import are_same
from quorate.replica.pipeline.called import call_of, cut_by
from quorate.replica.pipeline.routes import Route, routes
from quorate.replica.pipeline.split import Split
from quorate.replica.pipeline.stage_graph import StageGraph
from quorate.replica.shard_sum import ShardSum
from quorate.replica.streams import Stream

MOST_LOST = 3  # times that a run is begun anew because a process was killed


class PipelinedReplica(StagedReplica):
    """A replica whose stages are processes.

    Args:
        args: as for ``Replica``.
        own: likewise.
        options: likewise.
        split: where the model is cut, and in which order stages compute.
    """

    def __init__(self, *args: Any, split: Split, own: bool = False, **options: Any) -> None:
        super().__init__(*args, own=own, **options)
        self._split = split.as_chosen(options["computing"])
        self._notes = options["notes"]
        self._split.require_fits(self._computing, self._turn, self._layout, options)
        self._is_own = own
        self._read_by_stages = self._flat
        self._devices = len(self.group)
        self._graphs_of_stages: tuple[StageGraph, ...] = ()
        self._processes: StageDevices | None = None
        self._pool: GradientPool | None = None
        self._is_compared = False
        # Forks see what the parent writes into shared memory, and into no other.
        if self._is_copy or not isinstance(self._flat, Flat) or self._flat.segment is None:
            self._compute_from_a_copy()

    def changed(self) -> None:
        """Note that the model computes otherwise now: processes have it as it was."""
        super().changed()
        self.close()
        self._graphs_of_stages, self._is_compared = (), False

    def close(self) -> None:
        """End the processes; the next run starts new ones."""
        processes, self._processes = self._processes, None
        if processes is not None:
            processes.close()

    def recycle(self, shard_sum: ShardSum) -> None:
        """Take back the memory of a sum that nobody reads any more."""
        gradient, shard_sum.gradient = shard_sum.gradient, None
        if gradient is None or self._pool is None:
            return
        # Others are not kept: of a shard that was computed in one piece, as few are, or of a pool
        # that was too small.
        if (number := self._pool.number_of(gradient)) is not None:
            self._pool.give_back((number,))

    def gradients(self, given: Sequence[ShardInput], stream: Stream, of: int) -> list[ShardSum]:
        """Compute forward and backward over a run of shards: see ``Replica.gradient``. Blocks.

        Args:
            given: the shards, which follow each other.
            stream: the calling thread's.
            of: V.

        Returns:
            What each shard yields, but for gradients: the first shard of each maximal subtree of
            the run has the sum of all in it, and the others have none.

        Raises:
            UserError: the model cannot be cut so, or has other bits in stages.
            WorkerError: processes were killed again and again.
            Whatever user code raises in a stage, with a note that names it.
        """
        given[0].at("forward")
        if self._flat is not self._read_by_stages:  # they are of a snapshot
            self._compute_from_a_copy()
        if not self._graphs_of_stages:
            self._graphs_of_stages = self._cut(given[0], stream)
        if not self._is_compared:
            before = self._parameters_text()
            (first,) = self._through(given[:1], of)
            self._is_compared = self._compare(given[0], first, stream, before)
            if len(given) == 1:
                return [first]
            self.recycle(first)
        return self._through(given, of)

    def _through(self, given: Sequence[ShardInput], of: int) -> list[ShardSum]:
        """Have a run flow through the stages, however often processes are killed."""
        for _ in range(MOST_LOST):
            try:
                return self._flow(given, of)
            except GoneError as gone:
                assert self._processes is not None
                stage, how = self._processes.ended(gone.number)
                self.close()
                self._notes.add(
                    f"the process of stage {stage} of a replica {how}; the replica starts new "
                    "processes and computes its shards again"
                )
            except BaseException:
                self.close()  # they may be anywhere in the run
                raise
        raise WorkerError(
            f"processes of stages ended {MOST_LOST} times in one run of shards; the last, of "
            f"{self._named(stage)}, {how}"
        )

    def _compute_from_a_copy(self) -> None:
        """Have parameters where processes see them, from wherever they are pulled."""
        assert isinstance(self._flat, Flat)
        self.close()
        working = self._flat.layout.shared()
        working.take(self._flat)
        self._flat, self._is_copy, self.moves_parameters = working, True, self._is_own
        bind(self._trainable, working)
        self._version = None
        self._read_by_stages = working

    # --- the cut ----------------------------------------------------------------------------------

    def _cut(self, given: ShardInput, stream: Stream) -> tuple[StageGraph, ...]:
        """Return the stages, by what the loss function gives the model of a shard."""
        self.called.at = given.batch.at
        call = call_of(self, given.batch.data, given.rows, stream, given.seed)
        self._modes.set(True)
        assert self._split.names is not None
        return cut_by(self.model, self._split.names, call, self._accelerators)

    @property
    def _accelerators(self) -> Group | None:
        """The devices of stages, if these are threads."""
        return None

    def _parameters_text(self) -> str:
        assert isinstance(self._flat, Flat)
        return fingerprint(list(self._flat.views.values()))

    def _compare(self, given: ShardInput, through: ShardSum, stream: Stream, before: str) -> bool:
        """Compute a shard in one piece: the bits have to be those that came through the stages.

        Args:
            before: fingerprint of the parameters that the stages computed with.

        Returns:
            Whether both had the same parameters: of a shard that another worker has computed too,
            an update may have been made meanwhile, and what comes of it is thrown away.

        Raises:
            SettingError: they are others.
        """
        whole = self._in_one_piece(given, stream)
        assert whole.gradient is not None
        assert through.gradient is not None
        other = other_gradient(whole.gradient, through.gradient) or other_outcome(whole, through)
        if other is None:
            self.recycle(whole)
            return True
        if self._parameters_text() != before:
            return False
        got = f"{other} through the stages than in one piece"
        expected = "a model that gives the same bits in both ways"
        fix = "let the loss change nothing of the model but by one call of it, or cut elsewhere"
        raise SettingError("split", got, expected, fix)

    def _in_one_piece(self, given: ShardInput, stream: Stream) -> ShardSum:
        self.called.at = given.batch.at
        return self.gradient(given.batch.data, given.rows, stream, given.seed)

    # --- a run ------------------------------------------------------------------------------------

    def _flow(self, given: Sequence[ShardInput], of: int) -> list[ShardSum]:
        run = range(given[0].shard, given[0].shard + len(given))
        pool, lent = self._lent(run, of)
        numbers = {*lent.numbers}
        try:
            shards = self._computed(given, lent)
            for shard, number in lent.sums:
                each, summed = given[shard], pool.vectors[number]
                shards[shard].gradient = self._handed_over(each, summed)
                if each.into is None:
                    numbers.remove(number)
            return shards
        finally:
            pool.give_back(numbers)

    def _computed(self, given: Sequence[ShardInput], lent: LentVectors) -> list[ShardSum]:
        """Compute the shards of a run; gradients are in the vectors of the pool."""
        if self._processes is None:
            self._processes = self._start()
        stages, links = range(len(self._graphs_of_stages)), self._processes.links
        # 1. What the parent alone knows: values of buffers, and the rows.
        buffers = {}
        if self._buffers.are_any:
            self._set_pulled(self._buffers)
            buffers = {name: buffer.detach() for name, buffer in self.model.named_buffers()}
        self._processes.share(self.called.shared.values)
        rows = SCHEDULES[self._split.schedule](len(stages), len(given), devices=self._devices)
        for device, row in enumerate(rows):
            links.send(device, "run", (row, lent.puts, buffers))
        for each in given:
            for device in range(self._devices):
                links.send(device, "micro", Micro(each.batch, each.rows, each.seed))
        # 2. Each shard from each stage.
        sums = []
        for shard, each in enumerate(given):
            each.at("backward")
            forward, backward = (
                [self._answer(what, stage, shard, each.waits_for) for stage in stages]
                for what in ("forward", "backward")
            )
            each.at("pushing")
            sums.append(self._sum(forward, backward))
        return sums

    def _handed_over(self, given: ShardInput, summed: Flat) -> Flat:
        """Return a sum of gradients, which is where it was asked for."""
        for name in self._turn.trained.keys() - self._in_stages:
            summed.views[name].zero_()
        if given.into is None:
            return summed
        given.into.copy_(summed)
        return given.into

    def _answer(
        self, what: str, stage: int, shard: int, waits_for: Callable[[int], None]
    ) -> dict[str, Any]:
        processes = self._processes
        assert processes is not None
        keys = "failed", ("done", what, stage, shard)
        while (taken := processes.links.take_soon(*keys, within_s=STAGE_POLL_S)) is None:
            if (late := processes.late()) is not None:
                waits_for(late)
        key, said = taken
        if key != "failed":
            answer: dict[str, Any] = said
            if (log := own_log()) is not None:
                for work, span in answer["spans"].items():
                    log.stage(work, stage, shard, *span)
            return answer
        at, error = failure(said)
        error.add_note(f"quorate: {self._named(at)}")
        raise error

    def _named(self, stage: int) -> str:
        """Return which stage it is, in words."""
        graphs = self._graphs_of_stages
        begins = f"from {graphs[stage].begins} on" if stage else "the first modules"
        return f"stage {stage} of {len(graphs)} ({begins})"

    def _sum(
        self, forward: Sequence[Mapping[str, Any]], backward: Sequence[Mapping[str, Any]]
    ) -> ShardSum:
        """Put together what a shard yields beside its gradient."""
        outcome = forward[-1]
        weight = outcome["weight"]
        has = {name for said in backward for name in said["has"]}
        if weight > 0 and not has:
            self._turn.refuse()
        change = integer_buffers = None
        if self._buffers.are_any:
            self._set_pulled(self._buffers)
            self._buffers.begin()
            mine = dict(self.model.named_buffers())
            for said in forward:
                for name, value in said["buffers"].items():
                    mine[name].data.copy_(value)
            change = self._buffers.change(weight)
            integer_buffers = self._buffers.integer_buffers()
        return ShardSum(
            weight=weight,
            metrics=outcome["metrics"],
            buffers=change,
            integer_buffers=integer_buffers,
            missing=frozenset(self._turn.trained.keys() - has) if weight else None,
            totals=outcome["totals"],
        )

    # --- processes --------------------------------------------------------------------------------

    def _lent(self, run: range, of: int) -> tuple[GradientPool, LentVectors]:
        """Return the pool, and what a run has of it; a new one if it is too small."""
        lent = None if self._pool is None else self._pool.lend(run, of)
        if self._pool is None or lent is None:
            self.close()  # processes see the one that they were forked with
            self._pool = GradientPool(self._layout, run, of)
            lent = self._pool.lend(run, of)
            assert lent is not None
        return self._pool, lent

    def _start(self) -> StageDevices:
        """Start the processes."""
        graphs, pool = self._graphs_of_stages, self._pool
        assert pool is not None
        plan = self._routes(graphs)
        return StageProcesses(
            self._devices,
            Shared(pool.vectors, self._devices),
            partial(self.serve, graphs, plan, self._devices),
            self.called.shared.values,
        )

    def _routes(self, graphs: Sequence[StageGraph]) -> tuple[Route, ...]:
        plan = routes(graphs)
        self._in_stages = {name for route in plan for name in route.owned}
        return plan


def other_gradient(whole: Flat, through: Flat) -> str | None:
    """Return the first gradient that stages compute otherwise, in words; None: all are the same.

    Args:
        whole: gradients of a shard, or a sum of them, computed in one piece.
        through: the same, computed through the stages.
    """
    for name, view in whole.views.items():
        if not are_same(view, through.views[name]):
            return f"another gradient of {name}"
    return None


def other_outcome(whole: ShardSum, through: ShardSum) -> str | None:
    """Return what else stages compute otherwise of a shard, in words; None: it is the same.

    Metrics other than the loss do not count: one may be a number of seconds.
    """
    pairs = [(shard.metrics["loss"], shard.weight) for shard in (whole, through)]
    if repr(pairs[0]) != repr(pairs[1]):
        return "another loss"
    is_same = are_same(whole.buffers, through.buffers) and are_same(
        whole.integer_buffers, through.integer_buffers
    )
    return None if is_same else "other values of buffers"
