"""The ranks of a collective as owners: each rank has the state of its slices, and updates them.

Optimizers that do not work element by element receive the whole gradient on every rank, and make
the same step on each.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from quorate.engines.collective.exchange import GradientExchange
from quorate.errors import RankError, UserError
from quorate.replica.digest import flat_bytes
from quorate.replica.flat import Flat
from quorate.replica.shard_sum import ShardSum
from quorate.services.checkpoints.writer import Flush
from quorate.training.optimizing.entries import Listing, marks
from quorate.training.optimizing.known_optimizers import sent_values, storable_values
from quorate.training.optimizing.mean import Addition, Mean, make_mean
from quorate.training.optimizing.not_finite import not_finite
from quorate.training.optimizing.optimizer import FlatOptimizer
from quorate.training.owners import slice_files
from quorate.training.owners.slice_files import OwnerValues
from quorate.training.owners.slice_state import SliceState
from quorate.training.owners.spread_optimizer import SliceOwners, SpreadOptimizer


class RankOwners(SliceOwners):
    """All ranks of a collective, seen from one rank.

    Args:
        parameters: this rank's parameters, whole.
        exchange: the exchange of their gradients.
    """

    kind, leader = "rank", "rank 0"
    refuses_rows = "engine", "collective"

    def __init__(self, parameters: Flat, exchange: GradientExchange) -> None:
        super().__init__(parameters, SpreadOptimizer)
        self.exchange, self._ranks = exchange, exchange.ranks
        self.partition, self.owner = exchange.partition, exchange.ranks.rank
        self._optimizers: dict[str, SpreadOptimizer] = {}  # by prefix
        self._slices: dict[str, SliceState] = {}  # of this rank, by prefix of the optimizer
        self._marks: list[Any] = []
        self._ranks.methods |= {
            "make": self._make,
            "answer": self._answer,
            "swap": self._swap,
            "flush": self._flush,
        }

    def add(self, optimizer: FlatOptimizer, *, shards: bool) -> None:
        """Take charge of an optimizer; each rank is to have a slice of its state, if possible."""
        assert isinstance(optimizer, SpreadOptimizer)
        optimizer.is_spread = optimizer.is_spread and shards
        self._optimizers[optimizer.prefix] = optimizer

    # --- an update: all ranks call the methods ----------------------------------------------------

    def mean(self, total: ShardSum, additions: Sequence[Addition], *, wants_norm: bool) -> Mean:
        """Make this rank's slices of the mean gradient of a sum. Blocks.

        Args:
            total: the sum. Ranks have added its gradient, and exchanged whether the gradient is
                finite.
            additions: none.
            wants_norm: whether to compute the norm.
        """
        assert total.gradient is not None
        assert not additions
        gradient = total.gradient.on(self.parameters.device)
        if not (self.exchange.is_finite and math.isfinite(total.metrics["loss"])):
            return Mean(gradient, False, None)
        found = make_mean(
            gradient, (), total.divisor, checks=False, wants_squares=wants_norm, cores=self.cores
        )
        own = [square for squares in found.squares for square in squares]
        norm = self.partition.norm(self.norms(own)) if wants_norm else None
        return Mean(gradient, True, norm)

    def not_finite(self, gradient: Flat) -> list[str]:
        """Return the names of the parameters whose gradient has a non-finite element. Blocks."""
        pieces = self.partition.pieces(self.owner)
        own = [pieces[int(key)].name for key in not_finite(gradient)]
        odd = {name for each in self._ranks.gather(own) for name in each}
        return [name for name in self.partition.whole.sections if name in odd]

    def norms(self, own: list[float]) -> list[list[float]]:
        """Return the squared norms of blocks of all ranks, by rank. Blocks."""
        return self._ranks.gather(own)

    def gather_gradient(self, gradient: Flat) -> Flat:
        """Return the whole gradient, gathered from the slices of all ranks, in new memory. Blocks.

        All ranks call the method.
        """
        whole = self.parameters.layout.new(self.parameters.device)
        places = self.partition.views(whole, self.owner)
        for own, place in zip(gradient.vectors, places, strict=True):
            place.copy_(own)
        self.exchange.spread(whole)
        return whole

    def step(self, optimizer: FlatOptimizer, gradient: Flat, missing: Collection[str]) -> None:
        """Update the parameters from this rank's slice of the gradient. Blocks.

        Other ranks receive the parameters of a slice of the state by ``publish``.
        """
        if not optimizer.is_spread:
            optimizer.step(self.gather_gradient(gradient), missing)
            return
        optimizer.require_same_groups()
        groups = map(sent_values, optimizer.param_groups)
        self._slices[optimizer.prefix].update(gradient, missing, groups)
        optimizer.user_optimizer.step()  # no tensor has a gradient: only a schedule counts it

    def publish(self, optimizers: Sequence[FlatOptimizer]) -> None:
        """Send the parameters of this rank's slices to all ranks. Blocks."""
        if any(optimizer.is_spread for optimizer in optimizers):
            self.exchange.spread(self.parameters)

    @property
    def has_one_copy(self) -> bool:
        """True if all ranks share the same memory for the parameters."""
        return self.exchange.has_one_copy

    # --- state that every rank holds --------------------------------------------------------------

    def note_state(self) -> None:
        """Note the state that each rank holds by itself, before user code runs."""
        self._marks = self._marks_of_whole()

    def require_same_state(self) -> None:
        """Check that user code has not changed, on this rank alone, state held by every rank.

        Raises:
            UserError: user code has changed such state.
        """
        for (kind, noted), (_, now) in zip(self._marks, self._marks_of_whole(), strict=True):
            if noted != now:
                raise UserError(
                    "optimizer",
                    f"the state of {kind} was changed between updates, but each rank holds its "
                    "own part of the state",
                    fix="change the state in the optimizer's step(), or pass engine='processes'",
                )

    def _marks_of_whole(self) -> list[tuple[str, list[Any]]]:
        own = [o.user_optimizer for o in self._optimizers.values() if not o.is_spread]
        return [(type(optimizer).__name__, marks(optimizer.state)) for optimizer in own]

    # --- slices of the state: rank 0 calls --------------------------------------------------------

    def make_slices(self, optimizer: SpreadOptimizer, listing: Listing) -> None:
        """Have each rank make its part of an optimizer's state: see ``SliceOwners``. Blocks."""
        self._ranks.call("make", optimizer.prefix, listing)

    def ask(self, prefix: str, kind: str, **told: Any) -> list[dict[str, Any]]:
        """Send a request to each rank: see ``SliceOwners``. Blocks."""
        if self._ranks.is_broken:
            raise RankError("a rank is gone, and with it its part of the optimizer's state")
        with self._ranks.in_step():
            answers: list[dict[str, Any]] = self._ranks.call("answer", prefix, kind, told)
            return answers

    def swap_rest(self, prefix: str, values: OwnerValues, *, sends: bool) -> None:
        """Send values to parts of each rank, or receive values: see ``SliceOwners``. Blocks."""
        self._ranks.tell("swap", prefix, sends)
        with self._ranks.in_step():
            self._swap(prefix, sends, values)

    def begin_flush(self, folder: Path) -> Callable[[Flush], None]:
        """Begin to flush the files written by all ranks: see ``SliceOwners``."""
        self._ranks.tell("flush", str(folder))
        written = self._take_written()

        def flush_all(flush: Flush) -> None:
            for error in filter(None, self._flushed([*written, flush], folder)):
                raise error

        return flush_all

    # --- slices of the state: the part of this rank -----------------------------------------------

    def _make(self, prefix: str, listing: Listing) -> None:
        optimizer = self._optimizers[prefix]
        groups = zip(optimizer.groups, map(storable_values, optimizer.param_groups), strict=True)
        values = self.partition.views(self.parameters, self.owner)
        self._slices[prefix] = own = SliceState(
            type(optimizer.user_optimizer),
            groups,
            self.partition,
            self.owner,
            f"rank {self.owner}",
            Flat(self.partition.layout(self.owner), values),
            optimizer.elements,
        )
        own.put_zeros(listing)

    def _answer(self, prefix: str, kind: str, told: dict[str, Any]) -> list[dict[str, Any]]:
        return self._ranks.gather(self._slices[prefix].answer(kind, told))

    def _swap(self, prefix: str, sends: bool, values: OwnerValues | None = None) -> None:
        """Swap values with rank 0: see ``swap_rest``; ``values`` on rank 0 alone. Blocks."""
        own = self._slices[prefix].next_rest()
        if values is None:
            sends, addressed = not sends, [(0, flat_bytes(value)) for value in own]
        else:
            sources, targets = (values[0], own) if sends else (own, values[0])
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source)
            # One swap: values of all ranks are on their way at the same time.
            others = range(1, self._ranks.size)
            addressed = [(rank, flat_bytes(value)) for rank in others for value in values[rank]]
        self._ranks.swap(*((addressed, []) if sends else ([], addressed)))

    def _flush(self, folder: str) -> None:
        """Flush the files of this rank in a thread."""
        written = self._take_written()

        def run() -> None:
            with suppress(Exception):  # a rank is lost: the main thread raises the error
                self._flushed(written, Path(folder))

        # A daemon: a disk that hangs does not delay the end of the process.
        flushing = threading.Thread(target=run, name="quorate-checkpoints", daemon=True)
        try:
            flushing.start()
        except RuntimeError:  # the system starts no thread at present
            run()

    def _take_written(self) -> list[Flush]:
        """Return the functions that flush the files written by this rank."""
        return [own.take_written().flush for own in self._slices.values()]

    def _flushed(self, flushes: Sequence[Flush], folder: Path) -> list[OSError | None]:
        """Flush the files of this rank, and return the errors of all ranks. Blocks."""
        error: Exception | None = None
        try:
            for flush in flushes:
                flush()
        except Exception as raised:  # the edge of a thread: all ranks wait for an answer
            error = slice_files.named(raised, f"rank {self.owner}", folder)
        return self._ranks.gather(error, beside=True)
