"""A pipelined replica: its model is cut into stages, and shards flow through the stages.

The replica itself computes whole shards like any replica, for evaluations and comparisons. Shards
of a training step the replica deals to a process for each of its devices, a run at a time. The
results are, bit for bit, those of the replica itself: the first shard is computed in both ways, and
a model with a difference is refused.

Each stage adds up the gradients of a run itself, for its own parameters, in the order of the tree
of shards. So a few sums are held, however many shards a run has.

Legend: p devices, S stages, V shards of a step, m shards of a run.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from quorate.coordination.pipeline_schedules import SCHEDULES
from quorate.coordination.tree import PlacedShard, RunSums, leaves, run_sums
from quorate.engines import remote_error
from quorate.engines.stages.links import GoneError
from quorate.engines.stages.stage_devices import StageDevices, StageProcesses
from quorate.engines.stages.stage_runner import ShardInput, StagedReplica
from quorate.engines.tracing import own_log
from quorate.errors import SettingError, WorkerError
from quorate.machine.devices import Group
from quorate.machine.limits import STAGE_POLL_S
from quorate.machine.shared_memory import Segment
from quorate.replica.beside.values import SharedValues
from quorate.replica.fingerprint import fingerprint
from quorate.replica.flat import Flat, Layout
from quorate.replica.model import bind
from quorate.replica.pipeline.buffers import are_same
from quorate.replica.pipeline.called import call_of, cut_by
from quorate.replica.pipeline.routes import StageRoute, routes
from quorate.replica.pipeline.split import Split
from quorate.replica.pipeline.stage_graph import StageGraph
from quorate.replica.shard_sum import ShardSum
from quorate.replica.streams import Stream

_PAGE = 4096
MOST_LOST = 3  # attempts at a run of shards, each ended by a killed process


class PipelinedReplica(StagedReplica):
    """A replica whose stages are processes.

    Args:
        args: as for ``Replica``.
        own: likewise.
        options: likewise.
        split: the modules between stages, and the order of the stages' work.
    """

    def __init__(self, *args: Any, split: Split, own: bool = False, **options: Any) -> None:
        super().__init__(*args, own=own, **options)
        self._split = split.as_chosen(options["computing"])
        self._notes = options["notes"]
        self._split.require_fits(self._computing, self._turn, self._layout, options)
        self._is_own = own
        self._read_by_stages = self._flat
        self._devices = len(self.group)
        self._accelerators: Group | None = None  # the devices of stages, if these are threads
        self._graphs_of_stages: tuple[StageGraph, ...] = ()
        self._stage_devices: StageDevices | None = None
        self._values_of_stages: SharedValues | None = None  # the newest at the devices
        self._pool: GradientPool | None = None
        self._is_compared = False
        # Forks see what the parent writes into shared memory, and into no other.
        if self._is_copy or not isinstance(self._flat, Flat) or self._flat.segment is None:
            self._compute_from_a_copy()

    def changed(self) -> None:
        """Note that user code has changed the model: processes have the model before the change."""
        super().changed()
        self.close()
        self._graphs_of_stages, self._is_compared = (), False

    def close(self) -> None:
        """End the processes; the next run starts new ones."""
        devices, self._stage_devices = self._stage_devices, None
        if devices is not None:
            devices.close()

    def recycle(self, shard_sum: ShardSum) -> None:
        """Take back the memory of a sum without readers."""
        gradient, shard_sum.gradient = shard_sum.gradient, None
        # Further vectors are not kept: the few of shards in one piece, and those of a pool that was
        # too small.
        if gradient is not None and self._pool is not None:
            self._pool.recycle(gradient)

    def gradients(self, given: Sequence[ShardInput], stream: Stream, of: int) -> list[ShardSum]:
        """Compute forward and backward over a run of shards: see ``Replica.gradient``. Blocks.

        Args:
            given: consecutive shards.
            stream: the calling thread's.
            of: V.

        Returns:
            The result of each shard. The first shard of each maximal subtree of the run has the sum
            of the subtree's gradients, and the remaining shards have no gradient.

        Raises:
            UserError: the model cannot be cut so, or has different bits in stages.
            WorkerError: processes were killed again and again.
            All exceptions of user code in a stage, with a note about the stage.
        """
        given[0].on_phase("forward")
        if self._flat is not self._read_by_stages:  # parameters of a snapshot
            self._compute_from_a_copy()
        if not self._graphs_of_stages:
            self._graphs_of_stages = self._cut(given[0], stream)
        if not self._is_compared:
            before = self._parameters_text()
            (first,) = self._through(given[:1], of)
            if not first.awaits_totals:  # else there is no gradient to compare yet
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
                assert self._stage_devices is not None
                stage, how = self._stage_devices.ended(gone.number)
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
        """Have parameters in memory of all processes, and copy each pulled version there."""
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
        """Return the stages, by the loss function's call of the model for a shard."""
        batch = given.batch
        self.loss_call.at = batch.at
        call = call_of(self, batch.data, batch.rows, stream, batch.seed)
        self._modes.set(True)
        assert self._split.names is not None
        return cut_by(self.model, self._split.names, call, self._accelerators)

    def _parameters_text(self) -> str:
        assert isinstance(self._flat, Flat)
        return fingerprint(list(self._flat.views.values()))

    def _compare(self, given: ShardInput, through: ShardSum, stream: Stream, before: str) -> bool:
        """Compute a shard in one piece: the bits have to be those of the stages.

        Args:
            before: fingerprint of the parameters in the stages.

        Returns:
            Whether both had the same parameters: if a second worker has computed the shard too, an
            update may have been made meanwhile, and the result is thrown away.

        Raises:
            SettingError: the bits differ.
        """
        batch = given.batch
        self.loss_call.at = batch.at
        whole = self.gradient(batch.data, batch.rows, stream, batch.seed, scales=batch.scales)
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

    # --- a run ------------------------------------------------------------------------------------

    def _flow(self, given: Sequence[ShardInput], of: int) -> list[ShardSum]:
        run = range(given[0].shard, given[0].shard + len(given))
        pool, plan = self._lent(run, of)
        numbers = {*plan.sums.values()}
        try:
            shards = self._computed(given, pool, plan.puts)
            for node, number in plan.sums.items():
                shard = leaves(node, of).start - run.start
                each, summed = given[shard], pool.vectors[number]
                if shards[shard].awaits_totals:
                    continue
                shards[shard].gradient = self._handed_over(each, summed)
                if each.into is None:
                    numbers.remove(number)
            return shards
        finally:
            pool.give_back(numbers)

    def _computed(
        self, given: Sequence[ShardInput], pool: GradientPool, puts: Sequence[PlacedShard]
    ) -> list[ShardSum]:
        """Compute the shards of a run; gradients are in the vectors of the pool."""
        devices = self._stage_devices = self._stage_devices or self._start(pool)
        stages, links = range(len(self._graphs_of_stages)), devices.links
        # 1. What the parent alone knows: values of buffers and of ``Shared``, and the rows.
        buffers, values = {}, None
        if self._buffers.are_any:
            self._set_pulled(self._buffers)
            buffers = {name: buffer.detach() for name, buffer in self.model.named_buffers()}
        newest = self.loss_call.shared.values
        if newest is not None and newest is not self._values_of_stages:
            values = self._values_of_stages = newest
        rows = SCHEDULES[self._split.schedule](len(stages), len(given), devices=self._devices)
        for device, row in enumerate(rows):
            links.send(device, "run", (row, puts, buffers, values))
        for each in given:
            for device in range(self._devices):
                links.send(device, "batch", each.batch)
        # 2. Each shard from each stage.
        sums = []
        for shard, each in enumerate(given):
            each.on_phase("backward")
            answers = [self._answer(devices, stage, shard, each.waits_for) for stage in stages]
            each.on_phase("pushing")
            sums.append(self._sum(answers))
        return sums

    def _handed_over(self, given: ShardInput, summed: Flat) -> Flat:
        """Return a sum of gradients, in the vector that the caller wants."""
        for name in self._turn.trained.keys() - self._in_stages:
            summed.views[name].zero_()
        if given.into is None:
            return summed
        given.into.copy_(summed)
        return given.into

    def _answer(
        self, devices: StageDevices, stage: int, shard: int, waits_for: Callable[[int], None]
    ) -> dict[str, Any]:
        """Return a stage's answer to a shard. Blocks."""
        while True:
            try:
                key, answer = devices.links.take(
                    "failed", ("done", stage, shard), within_s=STAGE_POLL_S
                )
            except TimeoutError:
                if (late := devices.late()) is not None:
                    waits_for(late)
                continue
            if key == "failed":
                at, raised = answer
                error = remote_error.from_json(raised)
                error.add_note(f"quorate: {self._named(at)}")
                raise error
            if (log := own_log()) is not None:
                for work, span in answer["spans"].items():
                    log.stage(work, stage, shard, *span)
            found: dict[str, Any] = answer
            return found

    def _named(self, stage: int) -> str:
        """Return the stage in words."""
        graphs = self._graphs_of_stages
        begins = f"from {graphs[stage].begins} on" if stage else "the first modules"
        return f"stage {stage} of {len(graphs)} ({begins})"

    def _sum(self, answers: Sequence[Mapping[str, Any]]) -> ShardSum:
        """Return the result of a shard, from the answers of all stages, without the gradient."""
        outcome = answers[-1]
        weight, multiplier = outcome["weight"], outcome["multiplier"]
        has = {name for answer in answers for name in answer["has"]}
        if multiplier > 0 and not has:
            self._turn.refuse()
        change = integer_buffers = None
        if self._buffers.are_any:
            self._set_pulled(self._buffers)
            self._buffers.begin()
            own = dict(self.model.named_buffers())
            for answer in answers:
                for name, value in answer["buffers"].items():
                    own[name].data.copy_(value)
            change = self._buffers.change(weight)
            integer_buffers = self._buffers.integer_buffers()
        return ShardSum(
            weight=weight,
            metrics=outcome["metrics"],
            buffers=change,
            integer_buffers=integer_buffers,
            missing=frozenset(self._turn.trained.keys() - has) if multiplier else None,
            totals=outcome["totals"],
            denominators=outcome["denominators"],
        )

    # --- processes --------------------------------------------------------------------------------

    def _lent(self, run: range, of: int) -> tuple[GradientPool, RunSums]:
        """Return the pool, new if the last pool is too small, and the vectors of a run."""
        lent = None if self._pool is None else self._pool.lend(run, of)
        if self._pool is None or lent is None:
            self.close()  # processes see the pool before
            self._pool = GradientPool(self._layout, run, of)
            lent = self._pool.lend(run, of)
            assert lent is not None
        return self._pool, lent

    def _start(self, pool: GradientPool) -> StageDevices:
        """Start the processes."""
        graphs = self._graphs_of_stages
        self._values_of_stages = self.loss_call.shared.values  # forks have the parent's
        serve = partial(self.serve, graphs, self._routes(graphs), pool.vectors)
        return StageProcesses(self._devices, serve)

    def _routes(self, graphs: Sequence[StageGraph]) -> tuple[StageRoute, ...]:
        plan = routes(graphs)
        self._in_stages = {name for route in plan for name in route.owned}
        return plan


class GradientPool:
    """Some vectors of a layout, used in order of their numbers, so that few are written.

    The vectors are shared memory, and each stage writes separate slices. The first write of a page
    takes the page from the machine, for the writing process: of each vector a stage has the pages
    of its own parameters, and an unused vector costs nothing.

    Args:
        layout: of gradients.
        run: the shards to be added up.
        of: V, the shards of their step.
    """

    def __init__(self, layout: Layout, run: range, of: int) -> None:
        # For the run, and as many for earlier results of the step that are not added yet. The
        # vectors take address space, and no memory.
        places = 1 + max(put.place for put in run_sums(run, of, [*range(len(run))]).puts)
        count = 2 * max(places, of.bit_length() + 1) + 2
        nbytes = -(-max(1, layout.nbytes) // _PAGE) * _PAGE
        self._segment = Segment(count * nbytes)
        self.vectors = [layout.over(self._segment, number * nbytes) for number in range(count)]
        self._numbers = {id(flat): number for number, flat in enumerate(self.vectors)}
        self._free = [*range(count)]  # a heap

    def lend(self, run: range, of: int) -> RunSums | None:
        """Return the sums of a run of shards, with vectors' numbers as places; None: too few.

        The vectors of shards that are added to others are free again when the run is computed.

        Args:
            of: V, the shards of the step.
        """
        free = [*self._free]
        try:
            plan = run_sums(run, of, free)
        except IndexError:
            return None
        self._free = free
        return plan

    def give_back(self, numbers: Collection[int]) -> None:
        """Take back vectors without readers."""
        for number in numbers:
            heapq.heappush(self._free, number)

    def recycle(self, flat: Flat) -> None:
        """Take back a vector without readers, if the vector is of the pool."""
        if (number := self._numbers.get(id(flat))) is not None:
            heapq.heappush(self._free, number)


def other_gradient(whole: Flat, through: Flat) -> str | None:
    """Return the first gradient with different bits, in words; None: all are the same.

    Args:
        whole: gradients of a shard, or a sum of gradients, computed in one piece.
        through: the same, computed through the stages.
    """
    for name, view in whole.views.items():
        if not are_same(view, through.views[name]):
            return f"another gradient of {name}"
    return None


def other_outcome(whole: ShardSum, through: ShardSum) -> str | None:
    """Return a difference besides gradients, in words; None: all is the same.

    Of metrics only the loss counts: a metric may be a number of seconds.
    """
    pairs = [(shard.metrics["loss"], shard.weight) for shard in (whole, through)]
    if repr(pairs[0]) != repr(pairs[1]):
        return "another loss"
    is_same = are_same(whole.buffers, through.buffers) and are_same(
        whole.integer_buffers, through.integer_buffers
    )
    return None if is_same else "other values of buffers"
