"""A replica: a copy of the model for computing shards, one at a time.

Each shard is independent. The random stream is seeded by (seed, step, shard), the BatchNorm
statistics are those of the shard's own rows, and the gradient is weighted by the shard's own
weight. So the result is the same for any replica, at any time, and after any number of repetitions.

Legend: V shards of a step, P elements of the flat parameter vector.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch

from quorate.machine.devices import Group
from quorate.replica import loss
from quorate.replica.buffers import Buffers, copier
from quorate.replica.compiled import Compiled
from quorate.replica.compiling import UserCompiles, as_given, eagerly, is_compiled_by_script
from quorate.replica.computing import Computing
from quorate.replica.cuda_graph import CudaRecord, ShardGraphs, Step, forward_backward, has_graphs
from quorate.replica.device_generators import AloneOn, reseed_devices
from quorate.replica.flat import Flat
from quorate.replica.loss import NONE, Loss, LossCall, LossResult, Wanted
from quorate.replica.loss_terms import Scales
from quorate.replica.model import ModuleModes, bind, forget_grads, laid_out, take_grads
from quorate.replica.notes import Notes
from quorate.replica.phases.turn import CurrentPhase
from quorate.replica.placement.placement import Placement
from quorate.replica.precision import FIRST_SCALE, LEAST_SCALE, SCALE_STEP, derive, overflows
from quorate.replica.shard_sum import ShardSum
from quorate.replica.shared.alone import ShardTurns
from quorate.replica.shared.copies import copy_of
from quorate.replica.spread import DeviceSpread, SplitFlat, working_copy
from quorate.replica.streams import Seed, Stream
from quorate.replica.torch_internals import compiler_is_in_use
from quorate.replica.transfer import FreshBatch, Transfers, WrittenError
from quorate.replica.turns import Reseed, Turns
from quorate.replica.witness.witness import Witness

T = TypeVar("T")
Reload = Callable[[], Any]  # loads the batch of a shard anew
Phase = Callable[[str], None]  # receives "forward", "backward", ... when each begins


def no_phase(_name: str) -> None:
    """Ignore a phase."""


_Grads = dict[str, torch.Tensor]


class Replica:
    """A copy of the model, on a device, or spread over several.

    Args:
        model: the coordinator's model; the buffers are read before every shard.
        parameters: the trainable parameters of the model. A replica on the same device reads them
            in place: they change only while no replica computes.
        mutable_frozen: see ``Buffers``.
        written: names of trained parameters written by the forward pass; see ``ParameterWrites``.
        own: whether the replica is the model's only user, and needs no copy.
        set_buffers: sets the coordinator's values in buffers, before every shard. Default: copies
            the coordinator's present buffers; with ``own``, their values at construction.
        loss: the user's loss function.
        totals: names of counts and outputs in the loss function's result.
        turns: the turns shared by all replicas of the process.
        computing: precision, compiled or not, and where operators run.
        notes: messages for the user.
    """

    _derive: Callable[[torch.Tensor, float], None] = staticmethod(derive)  # the backward pass

    def __init__(
        self,
        model: torch.nn.Module,
        parameters: Flat,
        group: Group,
        *,
        spread: DeviceSpread | None = None,
        mutable_frozen: Collection[int] = (),
        written: Collection[str] = (),
        own: bool = False,
        set_buffers: Callable[[Buffers], None] | None = None,
        loss: Loss,
        totals: Wanted = NONE,
        turns: Turns,
        computing: Computing,
        notes: Notes,
    ) -> None:
        # At most 29 attributes: Python 3.11 reads them more slowly if an object has more.
        self.group = group
        self.device = group[0]  # the device of batches
        self.transfers = Transfers(self.device)
        # Receives the position of each shard from the loading code.
        self.loss_call = LossCall(loss, totals, self.device, self._begin_phase)
        self._computing, self._notes = computing, notes
        self._layout = parameters.layout.gradients
        trained = laid_out(model, parameters.layout.sections)
        lowered = computing.precision.working_tensors(model, trained)
        self._flat = working_copy(parameters, trained, lowered, group, spread)
        self._is_copy = self._flat is not parameters
        self.moves_parameters = own and self._is_copy  # in ``pull``, the model's are moved
        shares = self.device if spread is None else None  # a spread model shares no tensors
        self.model = model if own else copy_of(model, self._flat.views, shares, mutable_frozen)
        if spread is None:
            self.model.to(self.device)
        else:
            spread.put(self.model, group)
        self._given = as_given(model, self.model)  # the module passed to the loss function
        self._user_compiles, self._is_watched = UserCompiles(), False
        self._trainable = laid_out(self.model, parameters.layout.sections)
        bind(self._trainable, self._flat)
        wrap = partial(Compiled, threads=torch.get_num_threads()) if computing.compile else None
        self._turn = CurrentPhase(loss, self.model, self._trainable, wrap)
        self._loss = self._turn.loss(None)
        self._modes = ModuleModes(self.model)
        is_scripted = any(isinstance(m, torch.jit.ScriptModule) for m in self.model.modules())
        named = computing.deterministic
        self.alone = ShardTurns(turns, notes, named=named, scripted=is_scripted)
        self._buffers = Buffers(self.model, mutable_frozen)
        self._is_on_host = all(device.type == "cpu" for device in group)
        self._set_buffers = set_buffers or copier(Buffers(model, mutable_frozen), snapshot=own)
        self._set_pulled = self._set_buffers
        self.witness = Witness(self.model, model, parameters, loss, notes, written, mutable_frozen)
        self._placement = Placement(group, computing, notes, until=__file__)
        self._spare: list[Flat] = []  # vectors for gradients
        self._version: object = None
        self._graphs: ShardGraphs | None = None
        # A recorded CUDA graph repeats the same work. A scaled loss may have to be scaled anew, and
        # the host decides about this. Parameters written by forward lie elsewhere for each shard;
        # the number of rows read from a table varies; numbers of ``at`` and ``Shared`` would be
        # recorded as constants.
        varies = written or parameters.layout.by_rows or self._turn.has_phases
        varies = varies or self.loss_call.reads_numbers
        may_record = not (spread or computing.precision.is_scaled or varies)
        if computing.compile and has_graphs(self.device) and may_record:
            buffers = self.model.buffers
            self._graphs = ShardGraphs(CudaRecord(self.device), lambda: [*buffers()], notes)

    def pull(
        self,
        parameters: Flat,
        version: object,
        set_buffers: Callable[[Buffers], None] | None = None,
    ) -> None:
        """Compute from the given parameters: the coordinator's, averages, or a snapshot.

        Parameters on this replica's device are read in place; others are copied, once per version,
        and so are all parameters if the replica computes in another dtype.

        Args:
            set_buffers: sets the values of buffers that belong to the parameters. Default: the
                coordinator's.
        """
        self._set_pulled = set_buffers or self._set_buffers
        if self._is_copy:
            if version != self._version:
                self._flat.take(parameters)
                self._version = version
            if self.moves_parameters:
                bind(self._trainable, self._flat)
        elif self._flat is not parameters:
            bind(self._trainable, parameters)
            self._flat = parameters

    def _begin_phase(self, phase: str | None) -> None:
        """Compute the loss of a phase from now on, and gradients of its parameters; None: all."""
        if phase != self._turn.phase:
            self._loss = self._turn.loss(phase)

    def gradient(
        self,
        batch: Any,
        rows: int,
        stream: Stream,
        seed: Seed,
        *,
        into: Flat | None = None,
        at: Phase = no_phase,
        reload: Reload | None = None,
        scales: Scales | None = None,
        keep: Callable[[], None] | None = None,
    ) -> ShardSum:
        """Compute forward and backward over one shard.

        The gradient is that of the loss itself, a mean; the weight is applied when the gradient is
        copied. So hooks and user functions on gradients see the gradients of a plain loop.

        Args:
            batch: the collated rows, on the host. User code may write them, if ``reload`` is given.
            rows: number of rows: the weight, unless the loss function returns a weight.
            stream: the calling thread's stream.
            seed: seed of the shard.
            into: memory for the gradient. Default: vectors of this replica, to be returned with
                ``recycle``.
            at: receives "forward", "backward" and "pushing" when each begins.
            reload: loads the batch anew, if the shard has to be computed again and the batch was
                written; without it, user code receives copies.
            scales: of terms of the loss; None: the shard is a whole batch.
            keep: called if a second pass needs the rows again, and user code has not written them.

        Returns:
            The shard's weighted sums; without a gradient if the terms' totals have to be known.
        """
        at("forward")
        gradient = into if into is not None and into.device == self._gathers_on else None

        def compute(
            reseed: Reseed, loss: Loss, rows_of: FreshBatch
        ) -> tuple[LossResult, _Grads, float]:
            if self._graphs is not None and (graphs := self._graphs_for(loss)) is not None:
                step = graphs.run(
                    rows_of.on_device,
                    self._flat,
                    partial(self._begin, stream, seed, training=True),
                    partial(self._step, loss),
                )
                if step is not None:
                    return self._outcome(step, rows)
            scale = FIRST_SCALE if self._computing.precision.is_scaled else 1.0
            while True:
                fresh = rows_of.take()
                reseed(seed)
                self._begin(stream, seed, training=True)
                outcome = self._read(loss, fresh, rows, training=True, scales=scales)
                terms = outcome.denominators
                if terms is not None and terms.awaits_totals:
                    if keep is not None and not rows_of.is_written:
                        keep()
                    return outcome, {}, scale
                at("backward")
                if outcome.multiplier > 0:  # the loss of a shard of padding only may well be 0/0
                    if gradient is not None and scale == 1.0:
                        gradient.expect(self._trainable, outcome.multiplier)
                    self._derive(outcome.loss, scale)
                grads = take_grads(self._trainable)
                may_rescale = scale != 1.0 and scale > LEAST_SCALE
                if not may_rescale or not overflows(outcome.metrics["loss"], grads.values()):
                    return outcome, grads, scale
                scale /= SCALE_STEP

        with self._turn.alone():
            outcome, grads, scale = self._run(compute, batch, reload, stream, training=True)
        metrics, totals = outcome.weighted(), outcome.totals
        denominators, multiplier = outcome.denominators, outcome.multiplier
        if denominators is not None and denominators.awaits_totals:
            self.witness.end(self._flat)
            return ShardSum(outcome.weight, metrics, totals=totals, denominators=denominators)
        if multiplier > 0 and not grads:
            self._turn.refuse()
        at("pushing")
        written = self.witness.end(self._flat)
        if gradient is None:
            gradient = self._spare.pop() if self._spare else self._layout.new(self._gathers_on)
        gradient.fill(grads, multiplier / scale)
        if into is not None and gradient is not into:
            into.copy_(gradient)
            torch.accelerator.synchronize(self.device)
            self._spare.append(gradient)
            gradient = into
        return ShardSum(
            weight=outcome.weight,
            metrics=metrics,
            gradient=gradient,
            buffers=self._buffers.change(outcome.weight) if self._buffers.are_any else None,
            integer_buffers=self._buffers.integer_buffers() if self._buffers.are_any else None,
            missing=self._turn.missing(grads) if multiplier else None,
            totals=totals,
            written=written,
            denominators=denominators,
        )

    def evaluation(
        self,
        batch: Any,
        rows: int,
        stream: Stream,
        seed: Seed,
        *,
        reload: Reload | None = None,
        training: bool = False,
    ) -> ShardSum:
        """Compute forward over one shard: in evaluation mode without gradient, or for training."""

        def compute(reseed: Reseed, loss: Loss, rows_of: FreshBatch) -> LossResult:
            fresh = rows_of.take()
            reseed(seed)
            self._begin(stream, seed, training=training)
            marks = [] if training or not self._buffers.are_any else self._buffers.marks()
            outcome = self._read(loss, fresh, rows, training=False)
            if marks:
                for name in self._buffers.drop_writes(marks, self._set_pulled):
                    self._notes.add(
                        f"forward writes the buffer {name!r} in evaluation too; the values are "
                        "dropped, because evaluations and predictions do not change the model"
                    )
            return outcome

        with torch.set_grad_enabled(training):
            outcome = self._run(compute, batch, reload, stream, training=training)
        self.witness.end(self._flat)
        return ShardSum(
            outcome.weight,
            outcome.weighted(),
            totals=outcome.totals,
            outputs=outcome.pieces(),
            denominators=outcome.denominators,
        )

    def add(self, left: ShardSum, right: ShardSum) -> ShardSum:
        """Return left + right, in the memory of left; the memory of right is reused."""
        left.add(right)
        self.recycle(right)
        return left

    def recycle(self, shard_sum: ShardSum) -> None:
        """Reuse the memory of a sum that is not read any more."""
        if shard_sum.gradient is not None:
            self._spare.append(shard_sum.gradient)
            shard_sum.gradient = None

    def close(self) -> None:
        """Do nothing: no other process computes for this replica."""

    def changed(self) -> None:
        """Forget recorded graphs: the model has changed."""
        if self._graphs is not None:
            self._graphs.forget()

    @contextmanager
    def watched(self, watch: Callable[[Loss], Loss], *, eager: bool = True) -> Iterator[None]:
        """Replace the loss function by the result of ``watch`` inside the block.

        The function is called once whenever a shard is begun; the last call counts. It is not
        compiled: a watcher of operators or modules would see nothing.

        Args:
            eager: whether code compiled by the user runs uncompiled too; not needed for a mere
                substitute of the loss function.
        """
        kept, outer = self._loss, self._is_watched
        self._loss = watch(kept.plain if isinstance(kept, Compiled) else kept)
        self._is_watched = outer or eager
        try:
            yield
        finally:
            self._loss, self._is_watched = kept, outer

    @property
    def _gathers_on(self) -> torch.device:
        """The device of gradients."""
        return torch.device("cpu") if isinstance(self._flat, SplitFlat) else self.device

    @property
    def trained(self) -> Collection[str]:
        """The names of the parameters that have a gradient in the flat vector."""
        return self._trainable

    @property
    def is_in_fp32(self) -> bool:
        """True if products are rounded to float32, and not to a shorter dtype."""
        return self._computing.precision.name == "fp32"

    @property
    def compiles_loss(self) -> bool:
        """True if ``Compute(compile=True)`` compiles the loss function with the model."""
        return isinstance(self._loss, Compiled)

    @property
    def is_compiled(self) -> bool:
        """True if the loss function is compiled, or may call compiled code."""
        return self.compiles_loss or compiler_is_in_use()

    @property
    def is_compiled_by_script(self) -> bool:
        """True if the script compiled the model, a module in it, or the loss function."""
        return is_compiled_by_script(self.model, self._given, self.loss_call.loss)

    def _run(
        self,
        work: Callable[[Reseed, Loss, FreshBatch], T],
        batch: Any,
        reload: Reload | None,
        stream: Stream,
        *,
        training: bool,
    ) -> T:
        """Call ``work`` with the loss function, again after an attempt that does not count.

        ``placed`` moves operators without a kernel, and ``attempt`` chooses the function: as
        written, if operators are watched, else compiled.
        """
        loss, fresh = self._loss, FreshBatch(batch, self.transfers.take, keeps=reload is None)

        def placed(reseed: Reseed) -> T:
            def attempt(watched: bool) -> T:
                if watched or self._is_watched:
                    plain = loss.plain if isinstance(loss, Compiled) else loss
                    with eagerly():
                        return work(reseed, plain, fresh)
                if not isinstance(loss, Compiled):
                    return self._user_compiles.run(work, reseed, loss, fresh)
                return loss.run(
                    fresh.on_device, training=training, work=lambda each: work(reseed, each, fresh)
                )

            return self._placement.run(attempt, self.model, stream, training=training)

        while True:
            try:
                if self._is_on_host and self._computing.are_products_torchs:
                    with self.loss_call.shared.reading():
                        return self.alone.run(placed)
                # In this order: autograd's thread of a device reads the values of the replica that
                # is alone on the device.
                with (
                    AloneOn(self.group),
                    self._computing.products(),
                    self._computing.draws(stream, self.group),
                    self.loss_call.shared.reading(),
                ):
                    return self.alone.run(placed)
            except WrittenError:  # only now: threads that load rows may wait for a turn
                assert reload is not None
                fresh = FreshBatch(reload(), self.transfers.take, keeps=True)

    def _read(
        self,
        function: Loss,
        batch: Any,
        rows: int,
        *,
        training: bool,
        scales: Scales | None = None,
    ) -> LossResult:
        """Call the loss function, and check its result."""
        with self._computing.precision.operations(self.group):
            returned = self.loss_call(function, self._given, batch, training=training)
        totals = self.loss_call.totals
        return loss.read(returned, rows=rows, training=training, totals=totals, scales=scales)

    def _graphs_for(self, loss: Loss) -> ShardGraphs | None:
        """Return the CUDA graphs, unless operators are watched, or Python's generator draws."""
        return self._graphs if isinstance(loss, Compiled) and not self.alone.turns.draws else None

    def _step(self, function: Loss, batch: Any) -> Step:
        """Compute forward and backward for a CUDA graph."""
        with self._computing.precision.operations(self.group):
            returned = self.loss_call(function, self._given, batch, training=True)
        return forward_backward(returned, partial(take_grads, self._trainable))

    def _outcome(self, step: Step, rows: int) -> tuple[LossResult, _Grads, float]:
        """Return the results of a CUDA graph, in the form for ``gradient``."""
        outcome = loss.read(step.returned, rows=rows, training=False, totals=self.loss_call.totals)
        return outcome, step.grads if outcome.weight > 0 else {}, 1.0

    def _begin(self, stream: Stream, seed: Seed, *, training: bool) -> None:
        """Remove the effects of earlier shards: each shard is independent."""
        self._modes.set(training)
        forget_grads(self._trainable.values())  # left by an exception in backward
        if self._buffers.are_any:
            self._buffers.restore(self._set_pulled)
            if training:
                self._buffers.begin()
        self.witness.begin(self._flat)
        stream.reseed(seed)
        if not self._is_on_host:
            reseed_devices(self.group, seed)
