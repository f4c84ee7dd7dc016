"""A replica: a copy of the model that computes shards, one at a time.

A shard is computed alone. Its random stream is seeded by (seed, step, shard), its BatchNorm
statistics are those of its own rows, its gradient is weighted by its own weight. So it does not
matter which replica computes it, when, or how often.

Legend: V shards of a step, P elements of the flat parameter vector.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any, TypeVar

import torch

from quorate.errors import LossError
from quorate.machine.devices import Group
from quorate.replica import loss
from quorate.replica.buffers import Buffers, copier
from quorate.replica.compiled import Compiled
from quorate.replica.computing import Computing
from quorate.replica.cuda_graph import CudaRecord, ShardGraphs, Step, forward_backward
from quorate.replica.flat import Flat, Layout
from quorate.replica.loss import Loss, Outcome
from quorate.replica.model import bind, copy_of, trainable
from quorate.replica.notes import Notes
from quorate.replica.placement.placement import Placement
from quorate.replica.precision import FIRST_SCALE, LEAST_SCALE, SCALE_STEP
from quorate.replica.shard_sum import ShardSum
from quorate.replica.spread import Scattered, Spread
from quorate.replica.streams import Stream
from quorate.replica.transfer import Transfers
from quorate.replica.turns import Turns
from quorate.replica.witness.witness import Witness

T = TypeVar("T")
Reseed = Callable[[int], None]
Phase = Callable[[str], None]  # told "forward", "backward", ... when that begins


def no_phase(_name: str) -> None:
    """Tell nobody."""


_Grads = dict[str, torch.Tensor]


class Replica:
    """One copy of the model, on one device, or spread over several.

    Args:
        model: the user's model, the coordinator's; its buffers are read before every shard.
        parameters: its trainable parameters. A replica on the same device reads them where they
            are: they change only while no replica computes.
        mutable_frozen: see ``Buffers``.
        written: names of trained parameters that the forward pass writes; see ``Writes``.
        own: whether it may use the model itself and need not copy it: nobody else does.
        set_buffers: gives them the coordinator's values, before every shard. Default: those of the
            model now, or of the model that was copied as it then is.
        loss: the user's loss function.
        totals: names under which it may return counts.
        turns: one for all replicas of the process.
        computing: precision, compiled or not, and where operators run.
        notes: for the user.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        parameters: Flat,
        group: Group,
        *,
        spread: Spread | None = None,
        mutable_frozen: Collection[int] = (),
        written: Collection[str] = (),
        own: bool = False,
        set_buffers: Callable[[Buffers], None] | None = None,
        loss: Loss,
        totals: Collection[str] = (),
        turns: Turns,
        computing: Computing,
        notes: Notes,
    ) -> None:
        self.group = group
        self.device = group[0]  # where batches go
        self.transfers = Transfers(self.device)
        self._spread = spread
        self.plain_loss = loss
        self._loss = Compiled(loss, threads=torch.get_num_threads()) if computing.compile else loss
        self._totals = totals
        self._computing = computing
        self._notes = notes
        self._layout = parameters.layout  # of gradients
        self._flat = self._working_copy(model, parameters)
        self._is_copy = self._flat is not parameters
        # What a copy that is spread shared with the model would be moved away under it.
        shares = self.device if spread is None else None
        self.model = model if own else copy_of(model, self._flat.views, shares, mutable_frozen)
        if spread is None:
            self.model.to(self.device)
        else:
            spread.put(self.model, group)
        self._trainable = trainable(self.model)
        bind(self._trainable, self._flat)
        if not self.model.training:
            self.model.train()  # as loaded for inference; in a training model, eval() parts stay so
        self._modes = [(module, module.training) for module in self.model.modules()]
        self._buffers = Buffers(self.model, mutable_frozen)
        self._set_buffers = set_buffers or copier(Buffers(model, mutable_frozen), snapshot=own)
        self._set_pulled = self._set_buffers
        self.witness = Witness(
            self.model, parameters, written=written, mutable_frozen=mutable_frozen, notes=notes
        )
        self._turns = turns
        self._placement = Placement(group, computing, notes, until=__file__)
        self._free: list[Flat] = []
        self._version: object = None
        self._graphs: ShardGraphs | None = None
        # A loss that is scaled may have to be scaled anew, which is found out on the host.
        # What forward writes lies elsewhere for each shard.
        may_record = spread is None and not computing.precision.is_scaled and not written
        if computing.compile and self.device.type == "cuda" and may_record:
            record = CudaRecord(self.device)
            self._graphs = ShardGraphs(record, lambda: [*self.model.buffers()], notes)

    def pull(
        self,
        parameters: Flat,
        version: object,
        set_buffers: Callable[[Buffers], None] | None = None,
    ) -> None:
        """Compute from these parameters from now on: the coordinator's, averaged, or a snapshot.

        Those on this replica's device are read where they are; others are copied, once a version,
        and so are all that it computes with in another dtype.

        Args:
            set_buffers: gives buffers the values that go with them, if not the coordinator's.
        """
        self._set_pulled = set_buffers or self._set_buffers
        if self._is_copy:
            if version != self._version:
                self._flat.take(parameters)
                self._version = version
        elif self._flat is not parameters:
            bind(self._trainable, parameters)
            self._flat = parameters

    def gradient(
        self,
        batch: Any,
        rows: int,
        stream: Stream,
        seed: int,
        *,
        into: Flat | None = None,
        at: Phase = no_phase,
    ) -> ShardSum:
        """Compute forward and backward over one shard.

        Args:
            batch: the collated rows, on the host.
            rows: how many they are: the weight, unless the loss function says otherwise.
            stream: the calling thread's.
            seed: of the shard, 64 bits.
            into: where the gradient is written; else into vectors of this replica: give them back
                with ``recycle``.
            at: told "forward", "backward" and "pushing" when each begins.

        Returns:
            The shard's weighted sums.
        """
        at("forward")
        batch = self.transfers.take(batch)

        def compute(reseed: Reseed, loss: Loss) -> tuple[Outcome, _Grads, float]:
            scale = FIRST_SCALE if self._computing.precision.is_scaled else None
            if (graphs := self._graphs_for(loss)) is not None:
                step = graphs.run(
                    batch,
                    self._flat,
                    partial(self._begin, stream, seed, training=True),
                    partial(self._step, loss, rows),
                )
                if step is not None:
                    return self._outcome(step, rows)
            while True:
                reseed(seed)
                self._begin(stream, seed, training=True)
                outcome = self._read(loss, batch, rows, training=True)
                at("backward")
                # What the loss is multiplied by before it is derived. A weight is exact, but for a
                # loss whose dtype cannot hold it: 257 rows are 256 in bfloat16.
                factor = scale or (1.0 if outcome.is_narrow else outcome.weight)
                if outcome.weight > 0:  # a shard of padding alone may well have a loss of 0/0
                    torch.autograd.backward(outcome.loss, outcome.loss.new_tensor(factor))
                grads = self._take_grads()
                if scale is None or scale <= LEAST_SCALE or not _overflows(outcome, grads):
                    return outcome, grads, factor
                scale /= SCALE_STEP

        with _alone_on(self.group):
            outcome, grads, factor = self._run(compute, batch, stream, training=True)
        if outcome.weight > 0 and not grads:
            raise LossError(
                "the loss has no gradient with respect to the model it was given; use the `model` "
                "argument of the loss function and not a model from outside it"
            )
        at("pushing")
        written = self.witness.end(self._flat)
        gradient = into
        if gradient is None or gradient.device != self._gathers_on:
            gradient = self._free.pop() if self._free else self._layout.new(self._gathers_on)
        gradient.fill(grads)
        if factor != outcome.weight:
            for vector in gradient.vectors:
                vector.mul_(outcome.weight / factor)
        if into is not None and gradient is not into:
            into.copy_(gradient)
            torch.accelerator.synchronize(self.device)
            self._free.append(gradient)
            gradient = into
        return ShardSum(
            weight=outcome.weight,
            metrics=outcome.weighted(),
            gradient=gradient,
            buffers=self._buffers.weighted(outcome.weight),
            integer_buffers=self._buffers.integer_buffers(),
            missing=frozenset(self._trainable.keys() - grads.keys()) if outcome.weight else None,
            totals=outcome.totals,
            written=written,
        )

    def evaluation(self, batch: Any, rows: int, stream: Stream, seed: int) -> ShardSum:
        """Compute forward over one shard in evaluation mode, without gradient."""
        batch = self.transfers.take(batch)

        def compute(reseed: Reseed, loss: Loss) -> Outcome:
            reseed(seed)
            self._begin(stream, seed, training=False)
            return self._read(loss, batch, rows, training=False)

        with _alone_on(self.group), torch.no_grad():
            outcome = self._run(compute, batch, stream, training=False)
        self.witness.end(self._flat)
        return ShardSum(weight=outcome.weight, metrics=outcome.weighted(), totals=outcome.totals)

    def add(self, left: ShardSum, right: ShardSum) -> ShardSum:
        """Return left + right, in the memory of left; that of right is used again."""
        left.add(right)
        self.recycle(right)
        return left

    def recycle(self, shard_sum: ShardSum) -> None:
        """Take back the memory of a sum that nobody reads any more."""
        if shard_sum.gradient is not None:
            self._free.append(shard_sum.gradient)
            shard_sum.gradient = None

    @contextmanager
    def watched(self, watch: Callable[[Loss], Loss]) -> Iterator[None]:
        """Within the block the loss function is what ``watch`` makes of it.

        It is called once whenever a shard is begun; the last call is the one that counts. It is not
        compiled: what watches operators or modules would see nothing.
        """
        kept = self._loss
        self._loss = watch(kept.plain if isinstance(kept, Compiled) else kept)
        try:
            yield
        finally:
            self._loss = kept

    @property
    def is_compiled(self) -> bool:
        """Whether the loss function is compiled."""
        return isinstance(self._loss, Compiled)

    def _run(
        self, work: Callable[[Reseed, Loss], T], batch: Any, stream: Stream, *, training: bool
    ) -> T:
        """Compute with the loss function, compiled or not: more than once, if that is needed."""
        loss = self._loss

        def attempt(reseed: Reseed, watched: bool) -> T:
            if not isinstance(loss, Compiled):
                return work(reseed, loss)
            if watched:
                return work(reseed, loss.plain)
            return loss.run(batch, training=training, work=partial(work, reseed))

        return self._turns.run(
            lambda reseed: self._placement.run(
                partial(attempt, reseed), self.model, stream, training=training
            )
        )

    def _read(self, function: Loss, batch: Any, rows: int, *, training: bool) -> Outcome:
        """Call the loss function, and check what it returns."""
        with self._computing.precision.operations(self.group):
            returned = function(self.model, batch)
        return loss.read(returned, rows=rows, training=training, totals=self._totals)

    def _graphs_for(self, loss: Loss) -> ShardGraphs | None:
        """Return the CUDA graphs, unless operators are watched, or draws are Python's."""
        return self._graphs if isinstance(loss, Compiled) and not self._turns.draws else None

    def _step(self, function: Loss, rows: int, batch: Any) -> Step:
        """Compute forward and backward for a CUDA graph."""
        with self._computing.precision.operations(self.group):
            returned = function(self.model, batch)
        return forward_backward(returned, rows, self._take_grads)

    def _outcome(self, step: Step, rows: int) -> tuple[Outcome, _Grads, float]:
        """Return what a CUDA graph left, as ``gradient`` wants it."""
        outcome = loss.read(step.returned, rows=rows, training=False, totals=self._totals)
        factor = 1.0 if outcome.is_narrow else outcome.weight
        return outcome, step.grads if outcome.weight > 0 else {}, factor

    def _begin(self, stream: Stream, seed: int, *, training: bool) -> None:
        """Forget whatever an earlier shard left behind: a shard is computed alone."""
        for module, trains in self._modes:
            mode = training and trains
            if module.training is not mode:
                module.training = mode
        for parameter in self._trainable.values():
            parameter.grad = None  # an exception in backward leaves some
        self._set_pulled(self._buffers)
        self.witness.begin(self._flat)
        stream.reseed(seed)
        for device in self.group:
            if device.type != "cpu":
                with torch.accelerator.device_index(device.index or 0):
                    torch.get_device_module(device).manual_seed(seed)

    @property
    def _gathers_on(self) -> torch.device:
        """The device on which the gradient is put together."""
        return self.device if self._spread is None else torch.device("cpu")

    def _working_copy(self, model: torch.nn.Module, parameters: Flat) -> Flat | Scattered:
        """Return what this replica computes with: the parameters themselves, if it can."""
        lowered = self._computing.precision.working_tensors(model)
        if lowered is None and self._spread is None and parameters.device == self.device:
            return parameters
        working: Flat | Scattered
        if self._spread is not None:
            working = self._spread.working(dict(lowered or trainable(model).items()), self.group)
        else:
            layout = parameters.layout if lowered is None else Layout(lowered)
            working = layout.new(self.device)
        working.take(parameters)
        return working

    def _take_grads(self) -> _Grads:
        """Return the gradients by name; the parameters have none afterwards.

        Backward into an absent .grad takes over the tensor it computed, without an addition.
        """
        grads = {n: p.grad for n, p in self._trainable.items() if p.grad is not None}
        for parameter in self._trainable.values():
            parameter.grad = None
        return grads


def _overflows(outcome: Outcome, grads: _Grads) -> bool:
    """Return whether a smaller scale may help: the gradient is not finite, the loss is."""
    if not math.isfinite(outcome.metrics["loss"]):
        return False
    checks = [torch.isfinite(grad).all() for grad in grads.values()]
    # One transfer, and so one wait for the device, for all of them.
    return bool(checks) and not torch.stack([c.to(checks[0].device) for c in checks]).all()


@contextmanager
def _alone_on(group: Group) -> Iterator[None]:
    """Replicas on one accelerator share its generator, and so compute their shards in turn.

    The lock covers queuing the kernels; on the CPU every thread has a stream of its own.
    """
    with ExitStack() as stack:
        for device in sorted(group, key=str):  # replicas of several devices take them in one order
            if device.type != "cpu":
                stack.enter_context(_lock_of(device))
        yield


@cache
def _lock_of(_device: torch.device) -> threading.Lock:
    return threading.Lock()
