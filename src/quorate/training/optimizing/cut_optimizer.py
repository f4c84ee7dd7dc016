"""A cut optimizer: a rank has only the pieces of the optimizer's tensors in its own slice."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from quorate.engines.collective.rank_slices import RankSlices, SlicePart
from quorate.replica.flat import Flat
from quorate.training.optimizing.entries import copied, cut, end, is_like, part, told
from quorate.training.optimizing.optimizer import FlatOptimizer, OptimizerFactory
from quorate.training.optimizing.runs import Run, runs


class CutOptimizer(FlatOptimizer):
    """The user's optimizer, and an optimizer of the same kind over the pieces of a rank.

    Args:
        factory: the user's function from a list of parameters to an optimizer.
        model: the model whose trainable parameters are views of ``parameters``.
        parameters: this rank's parameters, whole.
        slices: the slices of the parameters.
        names: names of the optimizer's parameters. Default: all.
    """

    def __init__(
        self,
        factory: OptimizerFactory,
        model: torch.nn.Module,
        parameters: Flat,
        slices: RankSlices,
        names: Collection[str] | None = None,
    ) -> None:
        super().__init__(factory, model, parameters, names)
        self._slices = slices
        self._is_ours = False  # whether this code itself accesses the state of ``inner``
        self.is_lent = False  # whether user code has received all of the state
        self._mine: Optimizer | None = None  # over this rank's pieces; None: not cut yet
        # By the tensor of the pieces.
        self._own_pieces: dict[torch.Tensor, list[torch.nn.Parameter]] = {}

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """Mark accesses to the state of ``inner`` as this code's own, so that no state is lent."""
        before, self._is_ours = self._is_ours, True
        try:
            yield
        finally:
            self._is_ours = before

    # --- the state of all ranks, as saved ---------------------------------------------------------

    @property
    def is_spread(self) -> bool:
        """True if each rank has a part of the state, and no rank has the whole state."""
        return self._mine is not None and not self.is_lent

    @property
    def held(self) -> list[list[str]]:
        """The names of the parameters in each of the optimizer's tensors."""
        return [*self._held.values()]

    def described(self) -> list[list[Any]]:
        """Return the state entries of this rank by number of the tensor; see ``told``."""
        assert self._mine is not None
        return [
            [number, entry, *told(value, piece)]
            for number, tensor in enumerate(self._held)
            for piece in self._own_pieces.get(tensor, ())[:1]  # further pieces have the same
            for entry, value in self._mine.state.get(piece, {}).items()
        ]

    @contextmanager
    def outlined(self, described: Sequence[Sequence[Any]]) -> Iterator[None]:
        """Make ``state`` that of all ranks inside the block; entries per element are on "meta".

        Args:
            described: the entries, as described by the ranks.
        """
        tensors = [*self._held]
        with self._inside():
            for number, entry, dtype, plain, _ in described:
                tensor, value = tensors[number], plain
                if dtype is not None:
                    kind = getattr(torch, dtype)
                    by_element = plain == "piece"
                    value = (
                        torch.empty(tensor.shape, dtype=kind, device="meta")
                        if by_element
                        else torch.tensor(plain, dtype=kind)
                    )
                self.inner.state.setdefault(tensor, {}).setdefault(entry, value)
            try:
                yield
            finally:
                self.inner.state.clear()

    def runs_of(self, number: int, rank: int) -> list[Run]:
        """Return the runs of a tensor's parameters that a rank has."""
        tensor, names = [*self._held.items()][number]
        sections = self.flat_parameters.layout.sections
        return [*runs(self._places(tensor, rank), [sections[name] for name in names])]

    def values_of(self, number: int, entry: str) -> list[torch.Tensor]:
        """Return the values of a state entry for this rank's pieces of a tensor."""
        assert self._mine is not None
        pieces = self._own_pieces[[*self._held][number]]
        return [self._mine.state[piece][entry] for piece in pieces]

    # --- cuts -------------------------------------------------------------------------------------

    def _cut_own_where(self, kind: Callable[[str], object]) -> None:
        """Cut tensors, and pieces with their state, where parameters of a different kind begin."""
        before = self._held.keys()
        self._cut_where(kind)
        if self._mine is None or self._held.keys() == before:
            return
        was, pieces = self._mine, self._all_pieces()
        self._mine = None
        now = self._cut_of_this_rank()
        for piece in self._all_pieces():
            # A new piece lies within the old piece from which it was cut.
            whole = next(w for w in pieces if w.data_ptr() <= piece.data_ptr() < end(w))
            start = (piece.data_ptr() - whole.data_ptr()) // piece.element_size()
            now.state[piece] = {
                entry: value[start : start + piece.numel()].clone()
                if is_like(value, whole)
                else copied(value)
                for entry, value in was.state.get(whole, {}).items()
            }

    def _cut_of_this_rank(self) -> Optimizer:
        """Return the optimizer over this rank's pieces, made from ``inner`` at the first call.

        State of ``inner`` is cut into pieces, and removed from ``inner``.
        """
        if self._mine is not None:
            return self._mine
        groups, states = [], {}
        self._own_pieces = {}
        for group in self.inner.param_groups:
            params = []
            for tensor in group["params"]:
                pieces = self._own_pieces[tensor] = []
                for place in self._places(tensor, self._slices.ranks.rank):
                    piece = torch.nn.Parameter(part(tensor.detach(), place))
                    pieces.append(piece)
                    states[piece] = {
                        entry: cut(value, place, piece) if is_like(value, tensor) else copied(value)
                        for entry, value in self.inner.state.get(tensor, {}).items()
                    }
                params += pieces
            options = {name: value for name, value in group.items() if name != "params"}
            groups.append({**options, "params": params})
        self._mine = type(self.inner)(groups)  # type: ignore[call-arg]
        self._mine.state.update({piece: state for piece, state in states.items() if state})
        self.inner.state.clear()
        return self._mine

    def _all_pieces(self) -> list[torch.nn.Parameter]:
        return [piece for pieces in self._own_pieces.values() for piece in pieces]

    def _places(self, tensor: torch.Tensor, rank: int) -> list[SlicePart]:
        """Return the stretches of an optimizer's tensor that lie in a rank's slice."""
        section = self.flat_parameters.layout.sections[self._held[tensor][0]]
        span = range(section.start, section.start + tensor.numel())
        return [
            place._replace(start=place.start - section.start)
            for place in self._slices.within(span, section.vector, rank)
        ]
