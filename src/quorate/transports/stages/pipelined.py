"""A pipelined replica: its model is cut into stages, and shards flow through them.

The replica itself computes whole shards as any other does, for evaluations and to compare. Shards
of a training step it deals to a process for each of its devices, a run at a time. What comes back
is, bit for bit, what it would have computed itself: the first shard is computed in both ways, and a
model for which that does not hold is refused.

Legend: p devices, S stages, m shards of a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from quorate.coordination.schedules import SCHEDULES
from quorate.errors import SettingError, WorkerError
from quorate.machine.shared_memory import Segment
from quorate.replica.flat import Flat
from quorate.replica.model import bind
from quorate.replica.pipeline.buffers import Restored, are_same
from quorate.replica.pipeline.called import call_of, cut_by
from quorate.replica.pipeline.routes import Route, routes
from quorate.replica.pipeline.split import Split
from quorate.replica.pipeline.stage import Computing, Stage
from quorate.replica.pipeline.stage_graph import StageGraph
from quorate.replica.replica import Phase, Replica
from quorate.replica.shard_sum import ShardSum
from quorate.replica.streams import Stream
from quorate.transports import remote_error
from quorate.transports.stages.links import GoneError, Links
from quorate.transports.stages.process import Device, Micro, Shared, device_of, tell_failed
from quorate.transports.stages.stage_processes import StageProcesses
from quorate.transports.tracing.own_log import own_log

MOST_AT_FIRST = 32  # shards of a run that there is room for, until a longer one comes
MOST_LOST = 3  # times that a run is begun anew because a process was killed


class Given(NamedTuple):
    """One shard of a run, for a pipelined replica."""

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
        self._split = split.as_chosen(options["computing"])
        self._notes = options["notes"]
        self._split.require_fits(self._computing, self._turn, self.called, self._layout, options)
        # Forks see what the parent writes into shared memory, and into no other.
        assert isinstance(self._flat, Flat)
        working = self._flat.layout.shared()
        working.take(self._flat)
        self._flat, self._is_copy, self.moves_parameters = working, True, own
        bind(self._trainable, working)
        self._version = None
        self._devices = len(self.group)
        self._graphs_of_stages: tuple[StageGraph, ...] = ()
        self._processes: StageProcesses | None = None
        self._is_compared = False

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

    def gradients(self, given: Sequence[Given], stream: Stream) -> list[ShardSum]:
        """Compute forward and backward over a run of shards: see ``Replica.gradient``. Blocks.

        Args:
            given: the shards.
            stream: the calling thread's.

        Raises:
            UserError: the model cannot be cut so, or has other bits in stages.
            WorkerError: processes were killed again and again.
            Whatever user code raises in a stage, with a note that names it.
        """
        given[0].at("forward")
        if not self._graphs_of_stages:
            self._graphs_of_stages = self._cut(given[0], stream)
        for _ in range(MOST_LOST):
            try:
                sums = self._flow(given)
            except GoneError as gone:
                self.close()
                self._notes.add(
                    f"the process of stage {gone.number} of a replica ended; the replica has new "
                    "ones, and computes its shards anew"
                )
            except BaseException:
                self.close()  # they may be anywhere in the run
                raise
            else:
                if not self._is_compared:
                    self._compare(given[0], sums[0], stream)
                    self._is_compared = True
                return sums
        raise WorkerError(f"processes of stages ended {MOST_LOST} times in one run of shards")

    # --- the cut ----------------------------------------------------------------------------------

    def _cut(self, given: Given, stream: Stream) -> tuple[StageGraph, ...]:
        """Return the stages, by what the loss function gives the model of a shard."""
        call = call_of(self, lambda: self.gradient(given.batch, given.rows, stream, given.seed))
        self._modes.set(True)
        assert self._split.names is not None
        return cut_by(self.model, self._split.names, call)

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

    def _flow(self, given: Sequence[Given]) -> list[ShardSum]:
        if self._processes is not None and self._processes.most < len(given):
            self.close()
        if self._processes is None:
            self._processes = self._start(max(len(given), MOST_AT_FIRST))
        processes, stages = self._processes, range(len(self._graphs_of_stages))
        links, shards = processes.links, range(len(given))
        # 1. What the parent alone knows: values of buffers, and the rows.
        buffers = {}
        if self._buffers.are_any:
            self._set_pulled(self._buffers)
            buffers = {name: buffer.detach() for name, buffer in self.model.named_buffers()}
        rows = SCHEDULES[self._split.schedule](len(stages), len(given), devices=self._devices)
        for device, row in enumerate(rows):
            links.send(device, "run", (row, len(given), buffers))
        for each in given:
            for device in range(self._devices):
                links.send(device, "micro", Micro(each.batch, each.rows, each.seed))
        # 2. Each shard from each stage.
        sums = []
        for shard in shards:
            given[shard].at("backward")
            forward = [self._answer("forward", stage, shard) for stage in stages]
            backward = [self._answer("backward", stage, shard) for stage in stages]
            given[shard].at("pushing")
            sums.append(
                self._sum(given[shard], processes.shared.gradients[shard], forward, backward)
            )
        return sums

    def _answer(self, what: str, stage: int, shard: int) -> dict[str, Any]:
        assert self._processes is not None
        key, said = self._processes.links.take("failed", ("done", what, stage, shard))
        if key != "failed":
            answer: dict[str, Any] = said
            if (log := own_log()) is not None:
                log.stage(what, stage, shard, *answer["span"])
            return answer
        at, _ = said["at"]
        error = remote_error.from_json(said["error"])
        error.add_note(f"quorate: stage {at} of {len(self._graphs_of_stages)} ({self._from(at)})")
        raise error

    def _from(self, stage: int) -> str:
        """Return where a stage begins, in words."""
        return f"from {(self._split.names or ())[stage - 1]} on" if stage else "the first modules"

    def _sum(
        self,
        given: Given,
        slot: Flat,
        forward: Sequence[Mapping[str, Any]],
        backward: Sequence[Mapping[str, Any]],
    ) -> ShardSum:
        """Put together what a shard yields."""
        outcome = forward[-1]
        weight = outcome["weight"]
        has = {name for said in backward for name in said["has"]}
        if weight > 0 and not has:
            self._turn.refuse()
        for name in self._turn.trained.keys() - self._in_stages:
            slot.views[name].zero_()
        gradient = given.into
        if gradient is None:
            gradient = self._free.pop() if self._free else self._layout.new(self._gathers_on)
        gradient.copy_(slot)
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
            gradient=gradient,
            buffers=change,
            integer_buffers=integer_buffers,
            missing=frozenset(self._turn.trained.keys() - has) if weight else None,
            totals=outcome["totals"],
        )

    # --- processes --------------------------------------------------------------------------------

    def _start(self, most: int) -> StageProcesses:
        """Start the processes, for runs of at most so many shards."""
        graphs = self._graphs_of_stages
        plan = routes(graphs)
        self._in_stages = {name for route in plan for name in route.owned}
        # As much as the longest run may want: pages are taken when they are first written.
        nbytes = -(-max(1, self._layout.nbytes) // 4096) * 4096
        memory = Segment(most * nbytes)
        shared = Shared([self._layout.over(memory, n * nbytes) for n in range(most)])
        return StageProcesses(
            self._devices, shared, lambda *which: self._serve(graphs, plan, *which)
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
                    _, (row, shards, buffers) = links.take("run")
                    self._set_pulled = Restored(self.model, buffers)
                    device.run(row, shards)
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
