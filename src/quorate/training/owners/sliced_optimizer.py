"""An optimizer over a collective: each rank has the state of its slice, and updates the slice.

Optimizers that do not work element by element receive the whole gradient on every rank, and make
the same step on each.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from quorate.engines.collective.exchange import GradientExchange
from quorate.engines.partition import Partition, Piece
from quorate.errors import RankError, UserError
from quorate.replica.flat import Flat
from quorate.replica.shard_sum import ShardSum
from quorate.training.optimizing.closure import Closure
from quorate.training.optimizing.entries import (
    Listing,
    listed,
    marks,
    of_pieces,
    outlined,
)
from quorate.training.optimizing.known_optimizers import sent_values, storable_values
from quorate.training.optimizing.mean import (
    Addition,
    Mean,
    make_mean,
)
from quorate.training.optimizing.not_finite import not_finite
from quorate.training.optimizing.optimizer import OptimizerFactory
from quorate.training.owners import slice_files
from quorate.training.owners.slice_files import Row, Rows, StateFile
from quorate.training.owners.slice_state import SliceState
from quorate.training.owners.spread_optimizer import LentStates, SpreadOptimizer


class SlicedOptimizer(SpreadOptimizer):
    """The user's optimizer, stepped by all ranks together.

    Args:
        factory: the user's function from a list of parameters to an optimizer.
        model: the model; its trainable parameters are views of ``parameters``.
        parameters: this rank's parameters, whole.
        exchange: the exchange of their gradients.
        is_sharded: whether each rank has the state for its slices alone, if the optimizer works
            element by element.
        names, prefix: see ``FlatOptimizer``.

    Raises:
        SettingError: the factory returns no optimizer, or an optimizer unusable with any engine.
    """

    refuses_rows = "engine", "collective"

    def __init__(
        self,
        factory: OptimizerFactory,
        model: torch.nn.Module,
        parameters: Flat,
        *,
        exchange: GradientExchange,
        is_sharded: bool,
        names: Collection[str] | None,
        prefix: str,
    ) -> None:
        super().__init__(factory, model, parameters, names, prefix)
        self._exchange, self._ranks = exchange, exchange.ranks
        self.partition, self.owner = exchange.partition, exchange.ranks.rank
        self.is_sharded = is_sharded and self.uses_vectors
        # Of this rank; None: all of the state is in ``user_optimizer``.
        self.slice: SliceState | None = None
        self._is_alone = False
        self._noted: list[Any] = []
        if self.is_sharded:
            self.user_optimizer.state = LentStates(self._state_of, self.lend)
            exchange.ranks.methods |= {
                f"gather {prefix}": self.gather,
                f"take_part {prefix}": self.take_part,
            }

    # --- an update --------------------------------------------------------------------------------

    def mean(self, total: ShardSum, additions: Sequence[Addition], *, wants_norm: bool) -> Mean:
        """Make this rank's slices of the mean gradient of a sum. All ranks call the method.

        Args:
            total: the sum. Ranks have added its gradient, and exchanged whether the gradient is
                finite.
            additions: none.
            wants_norm: whether to compute the norm.
        """
        if self._is_alone:
            return super().mean(total, additions, wants_norm=wants_norm)
        assert total.gradient is not None
        assert not additions
        gradient = total.gradient.on(self.device)
        if not (self._exchange.is_finite and math.isfinite(total.metrics["loss"])):
            return Mean(gradient, False, None)
        found = make_mean(
            gradient, (), total.divisor, checks=False, wants_squares=wants_norm, cores=self.cores
        )
        own = [square for squares in found.squares for square in squares]
        norm = self.partition.norm(self.from_all_owners(own)) if wants_norm else None
        return Mean(gradient, True, norm)

    def not_finite(self, gradient: Flat) -> list[str]:
        """Return the names of the parameters whose gradient has a non-finite element."""
        if self._is_alone:
            return super().not_finite(gradient)
        pieces = self.partition.pieces(self.owner)
        own = [pieces[int(key)].name for key in not_finite(gradient)]
        odd = {name for each in self._ranks.gather(own) for name in each}
        return [name for name in self.partition.whole.sections if name in odd]

    def from_all_owners(self, own: list[float]) -> list[list[float]]:
        """Return the values of all ranks, by rank. Blocks."""
        return super().from_all_owners(own) if self._is_alone else self._ranks.gather(own)

    def whole_of(self, gradient: Flat) -> Flat:
        """Return the whole gradient, gathered from the slices of all ranks, in new memory. Blocks.

        All ranks call the method.
        """
        if self._is_alone:
            return super().whole_of(gradient)
        whole = self.flat_parameters.layout.new(self.device)
        places = self.partition.views(whole, self.owner)
        for own, place in zip(gradient.vectors, places, strict=True):
            place.copy_(own)
        self._exchange.spread(whole)
        return whole

    def step(
        self, gradient: Flat, missing: Collection[str] = (), closure: Closure | None = None
    ) -> None:
        """Update the parameters from this rank's slice of the gradient. Blocks.

        Other ranks receive the parameters of a slice of the state by ``publish``.

        Args:
            closure: with a closure, the gradient is a whole gradient returned by ``whole_of``.
        """
        if self._is_alone or closure is not None:
            super().step(gradient, missing, closure)
        elif not self.is_sharded:
            super().step(self.whole_of(gradient), missing)
        else:
            self.require_same_groups()
            self._own().update(gradient, missing, map(sent_values, self.param_groups))
            self.user_optimizer.step()  # no tensor has a gradient: only a schedule counts it

    def publish(self) -> None:
        """Send the parameters of this rank's slices to all ranks. All ranks call. Blocks."""
        if self.is_sharded and not self._is_alone:
            self._exchange.spread(self.flat_parameters)

    # --- the state of all ranks -------------------------------------------------------------------

    @property
    def is_away(self) -> bool:
        """True if each rank has a part of the state, and no rank has the whole state."""
        return self.slice is not None and not self.is_lent

    def _own(self) -> SliceState:
        """Return the state of this rank's slice, made from ``user_optimizer`` at the first call.

        State of ``user_optimizer`` is cut into pieces, and removed from ``user_optimizer``.
        """
        if self.slice is None:
            rank, groups = self.owner, map(storable_values, self.param_groups)
            pieces = self._pieces_of(rank)
            values = self.partition.views(self.flat_parameters, rank)
            self.slice = SliceState(
                type(self.user_optimizer),
                zip(self.groups, groups, strict=True),
                pieces,
                Flat(self.partition.layout(rank), values),
                self.elements,
            )
            self.slice.put(of_pieces(self.state(), pieces))
            dict.clear(self.user_optimizer.state)
        return self.slice

    def _pieces_of(self, rank: int) -> list[Piece]:
        """Return a rank's pieces of this optimizer's parameters."""
        return [p for p in self.partition.pieces(rank) if p.name in self.parameters]

    def stay_alone(self) -> None:
        """Gather all state on rank 0, and go on there without further ranks."""
        if self.is_away:
            self.fetch()
        self.read_all()
        self.slice, self._is_alone, self.is_lent = None, True, False
        self.partition, self.owner = Partition.whole_in(self.partition.whole), 0

    def load(self, loadable: dict[torch.Tensor, dict[str, Any]]) -> None:
        """Load the result of ``loadable``; at the next step, this rank keeps its own part alone."""
        super().load(loadable)
        self.slice = None

    def lend(self) -> None:
        """Gather all of the state on rank 0 when user code reads the state between updates."""
        if self._ranks.leads:
            super().lend()

    def fetch(self) -> None:
        """Gather on rank 0, after telling the other ranks to take part."""
        if self._ranks.is_broken:
            raise RankError("a rank is gone, and with it its part of the optimizer's state")
        self._ranks.call(f"gather {self.prefix}")

    def gather(self) -> None:
        """Send this rank's state to rank 0, to be assembled there. All ranks call the method."""
        own = self._own()
        entries = self.joined(self._ranks.gather(listed(own.state())))
        if self._ranks.leads:
            self.put(entries)
        rows = Rows(slice_files.rows_of(listed(entries)), self.partition)
        slice_files.move_in_memory(self._ranks, own, rows, self.state(), is_read=False)

    def scatter(self) -> None:
        """Send each rank its part of the state, from the whole state on rank 0. Blocks.

        Each rank with access to the file reads the entries not read yet.
        """
        path, listing, unread = self.unread, listed(self.state()), None
        if path is not None:
            rows = slice_files.rows_in(path, listing, self.prefix)
            unread = [str(path), slice_files.mark(path), rows]
        self._ranks.call(f"take_part {self.prefix}", listing, unread)
        self.is_lent, self.unread = False, None

    def take_part(self, listing: Listing, unread: list[Any] | None) -> None:
        """Receive this rank's part of the state from ``scatter``, and drop the present state.

        All ranks call the method. Blocks.

        Args:
            listing: all entries.
            unread: the file with these entries, if they are not read yet: its path, its ``mark`` on
                rank 0, and the rows.
        """
        ranks, whole = self._ranks, self.state()
        dict.clear(self.user_optimizer.state)
        self.slice = None
        own = self._own()
        part = outlined(listing, self.partition.whole.sections)
        own.put(of_pieces(part, self._pieces_of(ranks.rank)))
        if unread is None:
            rows = Rows(slice_files.rows_of(listing), self.partition)
            slice_files.move_in_memory(ranks, own, rows, whole, is_read=True)
            return
        path, mark, found = unread
        rows = Rows([Row(*row) for row in found], self.partition)
        sees = ranks.gather(ranks.leads or slice_files.sees(Path(path), mark))
        with closing(StateFile(Path(path), is_read=True)) as file:
            slice_files.move(ranks, own, rows, file, sees)

    @property
    def is_large(self) -> bool:
        """True if the state is too large to be held by a single rank."""
        return self.is_sharded and super().is_large

    # --- state that every rank holds --------------------------------------------------------------

    def note_state(self) -> None:
        """Note the state that each rank holds by itself, before user code runs."""
        self._noted = [] if self.is_sharded else marks(self.user_optimizer.state)

    def require_same_state(self) -> None:
        """Check that user code has not changed, on this rank alone, state held by every rank.

        Raises:
            UserError: user code has changed such state.
        """
        if (
            not self.is_sharded
            and not self._is_alone
            and marks(self.user_optimizer.state) != self._noted
        ):
            raise UserError(
                "optimizer",
                f"the state of {type(self.user_optimizer).__name__} was changed between updates, "
                "but each rank holds its own part of the state",
                fix="change the state in the optimizer's step(), or pass engine='processes'",
            )
