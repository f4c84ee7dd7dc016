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

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from quorate.coordination.schedules import SCHEDULES
from quorate.errors import LossError, SettingError, WorkerError
from quorate.replica.flat import Flat
from quorate.replica.loss import Loss
from quorate.replica.model import bind
from quorate.replica.pipeline.buffers import Restored, are_same
from quorate.replica.pipeline.cut import cut
from quorate.replica.pipeline.routes import Route, routes
from quorate.replica.pipeline.split import Split
from quorate.replica.pipeline.stage import FIX, Computing, Stage
from quorate.replica.pipeline.stage_graph import StageGraph
from quorate.replica.replica import Phase, Replica
from quorate.replica.shard_sum import ShardSum
from quorate.replica.streams import Stream
from quorate.replica.turns import Turns
from quorate.transports import remote_error
from quorate.transports.stages.gradient_pool import GradientPool, Lent
from quorate.transports.stages.links import GoneError, Links
from quorate.transports.stages.process import Device, Micro, Shared, device_of, tell_failed
from quorate.transports.stages.stage_processes import StageProcesses

MOST_LOST = 3  # times that a run is begun anew because a process was killed


class Given(NamedTuple):
    """One shard of a run, for a pipelined replica."""

    shard: int  # its number in its step
    batch: Any
    rows: int
    seed: int
    into: Flat | None  # as for ``Replica.gradient``
    at: Phase


class Pipelined(Replica):
    """A replica whose stages are processes.

    Args:
        args: as for ``Replica``.
        own: likewise.
        options: likewise.
        split: where the model is cut, and in which order stages compute.
    """

    def __init__(self, *args: Any, split: Split, own: bool = False, **options: Any) -> None:
        super().__init__(*args, own=own, **options)
        self._split = split
        self._notes = options["notes"]
        split.require_fits(self._computing, self._turn, self.called, self._layout, options)
        self._is_own = own
        self._read_by_stages = self._flat
        self._devices = len(self.group)
        self._graphs_of_stages: tuple[StageGraph, ...] = ()
        self._processes: StageProcesses | None = None
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

    def gradients(self, given: Sequence[Given], stream: Stream, of: int) -> list[ShardSum]:
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
            (first,) = self._through(given[:1], of)
            self._compare(given[0], first, stream)
            self._is_compared = True
            if len(given) == 1:
                return [first]
            self.recycle(first)
        return self._through(given, of)

    def _through(self, given: Sequence[Given], of: int) -> list[ShardSum]:
        """Have a run flow through the stages, however often processes are killed."""
        for _ in range(MOST_LOST):
            try:
                return self._flow(given, of)
            except GoneError as gone:
                self.close()
                self._notes.add(
                    f"the process of stage {gone.number} of a replica ended; the replica has new "
                    "ones, and computes its shards anew"
                )
            except BaseException:
                self.close()  # they may be anywhere in the run
                raise
        raise WorkerError(f"processes of stages ended {MOST_LOST} times in one run of shards")

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

    def _cut(self, given: Given, stream: Stream) -> tuple[StageGraph, ...]:
        """Return the stages, by what the loss function gives the model of a shard."""
        calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

        def note(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls.append((args, kwargs))

        def afresh(function: Loss) -> Loss:
            def loss(*args: Any) -> Any:
                calls.clear()  # a shard may be computed again, which does not count
                return function(*args)

            return loss

        handle = self.model.register_forward_pre_hook(note, with_kwargs=True)
        try:
            with self.watched(afresh):
                self.evaluation(given.batch, given.rows, stream, given.seed, training=True)
        finally:
            handle.remove()
        if len(calls) != 1:
            raise LossError(f"the loss called the model {len(calls)} times, expected once; {FIX}")
        self._modes.set(True)
        args, kwargs = calls[0]
        # In a turn: threads that load rows draw from generators, which the cut looks at.
        return Turns().run(lambda _: cut(self.model, self._split.names, args, kwargs))

    def _compare(self, given: Given, through: ShardSum, stream: Stream) -> None:
        """Compute a shard in one piece: the bits have to be those that came through the stages.

        Raises:
            SettingError: they are others.
        """
        whole = self.gradient(given.batch, given.rows, stream, given.seed)
        assert whole.gradient is not None
        assert through.gradient is not None
        differing = [
            name
            for name, view in whole.gradient.views.items()
            if not are_same(view, through.gradient.views[name])
        ]
        if differing:
            got = f"another gradient of {differing[0]} through the stages than in one piece"
        elif repr(whole.metrics) != repr(through.metrics) or whole.weight != through.weight:
            got = "another loss through the stages than in one piece"
        elif not are_same(whole.buffers, through.buffers):
            got = "other values of buffers through the stages than in one piece"
        else:
            self.recycle(whole)
            return
        expected = "a model that gives the same bits in both ways"
        fix = "let the loss change nothing of the model but by one call of it, or cut elsewhere"
        raise SettingError("split", got, expected, fix)

    # --- a run ------------------------------------------------------------------------------------

    def _flow(self, given: Sequence[Given], of: int) -> list[ShardSum]:
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

    def _computed(self, given: Sequence[Given], lent: Lent) -> list[ShardSum]:
        """Compute the shards of a run; gradients are in the vectors of the pool."""
        if self._processes is None:
            self._processes = self._start()
        stages, links = range(len(self._graphs_of_stages)), self._processes.links
        # 1. What the parent alone knows: values of buffers, and the rows.
        buffers = {}
        if self._buffers.are_any:
            self._set_pulled(self._buffers)
            buffers = {name: buffer.detach() for name, buffer in self.model.named_buffers()}
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
            forward = [self._answer("forward", stage, shard) for stage in stages]
            backward = [self._answer("backward", stage, shard) for stage in stages]
            each.at("pushing")
            sums.append(self._sum(forward, backward))
        return sums

    def _handed_over(self, given: Given, summed: Flat) -> Flat:
        """Return a sum of gradients, which is where it was asked for."""
        for name in self._turn.trained.keys() - self._in_stages:
            summed.views[name].zero_()
        if given.into is None:
            return summed
        given.into.copy_(summed)
        return given.into

    def _answer(self, what: str, stage: int, shard: int) -> dict[str, Any]:
        assert self._processes is not None
        key, said = self._processes.links.take("failed", ("done", what, stage, shard))
        if key != "failed":
            answer: dict[str, Any] = said
            return answer
        at, _ = said["at"]
        error = remote_error.from_json(said["error"])
        error.add_note(f"quorate: stage {at} of {len(self._graphs_of_stages)} ({self._from(at)})")
        raise error

    def _from(self, stage: int) -> str:
        """Return where a stage begins, in words."""
        return f"from {self._split.names[stage - 1]} on" if stage else "the first modules"

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

    def _lent(self, run: range, of: int) -> tuple[GradientPool, Lent]:
        """Return the pool, and what a run has of it; a new one if it is too small."""
        lent = None if self._pool is None else self._pool.lend(run, of)
        if self._pool is None or lent is None:
            self.close()  # processes see the one that they were forked with
            self._pool = GradientPool(self._layout, run, of)
            lent = self._pool.lend(run, of)
            assert lent is not None
        return self._pool, lent

    def _start(self) -> StageProcesses:
        """Start the processes."""
        graphs, pool = self._graphs_of_stages, self._pool
        assert pool is not None
        plan = routes(graphs)
        self._in_stages = {name for route in plan for name in route.owned}
        return StageProcesses(
            self._devices, Shared(pool.vectors), lambda *which: self._serve(graphs, plan, *which)
        )

    def _serve(
        self,
        graphs: Sequence[StageGraph],
        plan: Sequence[Route],
        number: int,
        links: Links,
        shared: Shared,
    ) -> None:
        """Be the process of a device, until the parent wants no more."""
        with Stream() as stream, self._computing.products():
            computing = Computing(
                self.model, self._trainable, self._begin_in_stage, self._read_in_stage, stream
            )
            stages = {
                graph.index: Stage(graph, route, computing)
                for graph, route in zip(graphs, plan, strict=True)
                if device_of(graph.index, self._devices) == number
            }
            device = Device(number, self._devices, stages, links, shared)
            try:
                while True:
                    _, (row, puts, buffers) = links.take("run")
                    self._set_pulled = Restored(self.model, buffers)
                    device.run(row, puts)
            except GoneError:
                return  # the parent decides
            except BaseException as error:  # the edge of the process
                tell_failed(links, device, error)
                with suppress(GoneError):
                    links.take("end")

    def _begin_in_stage(self, stream: Stream, seed: int) -> None:
        self._begin(stream, seed, training=True)

    def _read_in_stage(self, batch: Any, rows: int) -> Any:
        return self._read(self.plain_loss, batch, rows, training=True)
