"""An optimizer over a collective: each rank has the state of its slice, and updates that.

What works element by element does the same to an element in a slice as in a whole vector. Others
are given the whole gradient on every rank, and do the same there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from quorate.errors import RankError
from quorate.replica.flat import Flat
from quorate.training.optimizing.closure import Closure
from quorate.training.optimizing.known_optimizers import fill_momenta
from quorate.training.optimizing.optimizer import FlatOptimizer, OptimizerFactory
from quorate.transports.collective.exchange import Exchange
from quorate.transports.collective.slices import Piece

GATHER = "gather"  # the kind of a record: all ranks call ``SlicedOptimizer.gather``


class SlicedOptimizer(FlatOptimizer):
    """The user's optimizer; all ranks step it together.

    Args:
        factory: the user's, from a list of parameters to an optimizer.
        model: whose trainable parameters are views of ``parameters``.
        parameters: this rank's, whole.
        exchange: of them.
        is_sharded: whether each rank has the state for its slices alone, where that can be.

    Raises:
        SettingError: it is none, or one that no engine can take.
    """

    def __init__(
        self,
        factory: OptimizerFactory,
        model: torch.nn.Module,
        parameters: Flat,
        *,
        exchange: Exchange,
        is_sharded: bool,
    ) -> None:
        super().__init__(factory, model, parameters)
        self._exchange, self._slices = exchange, exchange.slices
        self._is_sharded = is_sharded and self.flat
        self._is_alone = False
        self._mine: Optimizer | None = None  # over this rank's pieces; None: not cut yet
        # By the tensor that they are of.
        self._own_pieces: dict[torch.Tensor, list[torch.nn.Parameter]] = {}

    def whole_of(self, gradient: Flat) -> Flat:
        """Return the whole gradient of which each rank has its slice, in memory of its own. Blocks.

        All ranks call it.
        """
        if self._is_alone:
            return super().whole_of(gradient)
        whole = self.flat_parameters.layout.new(self.device)
        self._slices.put(gradient, whole)
        self._exchange.spread(whole)
        return whole

    def step(
        self, gradient: Flat, missing: Collection[str] = (), closure: Closure | None = None
    ) -> None:
        """Update the parameters of all ranks from this rank's slice of the gradient. Blocks.

        Args:
            closure: with one, the gradient is the whole one that ``whole_of`` gave.
        """
        if self._is_alone or closure is not None:
            super().step(gradient, missing, closure)
            return
        if not self._is_sharded:
            super().step(self.whole_of(gradient), missing)
            return
        self.require_same_groups()
        if missing:
            self._cut_own_where(lambda name: name in missing)
        own = self._cut_of_this_rank()
        for group, theirs in zip(own.param_groups, self.inner.param_groups, strict=True):
            group.update({name: value for name, value in theirs.items() if name != "params"})
        for tensor, pieces in self._own_pieces.items():
            first = self._held[tensor][0]
            vector = gradient.vectors[self.flat_parameters.layout.sections[first].vector]
            places = self._places(tensor, self._slices.ranks.rank)
            for piece, place in zip(pieces, places, strict=True):
                if first in missing:
                    piece.grad = None
                else:
                    piece.grad = vector[place.at : place.at + place.length]
        if type(own) is torch.optim.SGD:
            fill_momenta(own)
        own.step()
        self.inner.step()  # of nothing, as no tensor of it has a gradient: a schedule counts it
        self._exchange.spread(self.flat_parameters)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Within the block rank 0 has the state of all, as if it had no others."""
        if self._mine is None:  # no step yet, or all of it is here
            yield
            return
        self._ask()
        try:
            yield
        finally:
            self.inner.state.clear()

    def stay_alone(self) -> None:
        """Take all state to rank 0, which goes on without the others."""
        if self._mine is not None:
            self._ask()
        self._mine, self._own_pieces, self._is_alone = None, {}, True

    def load(self, loadable: dict[torch.Tensor, dict[str, Any]]) -> None:
        """Take what ``loadable`` gave; from the next step on this rank keeps what it owns of it."""
        super().load(loadable)
        self._mine, self._own_pieces = None, {}

    def gather(self) -> None:
        """Send what this rank has to rank 0, which puts it together. All ranks call it."""
        ranks, tensors = self._slices.ranks, [*self._held]
        assert self._mine is not None
        own: list[torch.Tensor] = []
        header: list[list[Any]] = []  # of which tensor, of which of its pieces, which entry
        for number, tensor in enumerate(tensors):
            for which, piece in enumerate(self._own_pieces.get(tensor, ())):
                for entry, value in self._mine.state.get(piece, {}).items():
                    header.append([number, which, entry, *_described(value, piece)])
                    if isinstance(value, torch.Tensor):
                        own.append(value.contiguous())
        headers = [json.loads(text) for text in ranks.gather(json.dumps(header).encode())]
        if not ranks.leads:
            ranks.swap([(0, value) for value in own], [])
            return
        takes: list[tuple[int, torch.Tensor]] = []
        state: dict[torch.Tensor, dict[str, Any]] = {}
        values = iter(own)
        for rank, listed in enumerate(headers):
            for number, which, entry, dtype, shape, plain in listed:
                tensor = tensors[number]
                entries = state.setdefault(tensor, {})
                if dtype is None:
                    entries[entry] = plain
                    continue
                is_piece = shape == "piece"
                kind = getattr(torch, dtype)
                place = self._places(tensor, rank)[which]
                if entry not in entries:
                    size = tensor.shape if is_piece else shape
                    device = tensor.device if is_piece else torch.device("cpu")
                    entries[entry] = torch.zeros(size, dtype=kind, device=device)
                whole = entries[entry]
                target = _part(whole, place) if is_piece else torch.empty_like(whole)
                if rank == 0:
                    target.copy_(next(values))
                else:
                    takes.append((rank, target))
                if not is_piece:
                    entries[entry] = target  # counters, the same on all ranks
        ranks.swap([], takes)
        self.inner.state.clear()
        self.inner.state.update(state)

    def _ask(self) -> None:
        """On rank 0, gather; the others hear of it."""
        if self._slices.ranks.is_broken:
            raise RankError("a rank is gone, and with it its part of the optimizer's state")
        self._slices.ranks.tell({"kind": GATHER})
        self.gather()

    def _cut_own_where(self, kind: Callable[[str], object]) -> None:
        """Cut tensors, and pieces with their state, where parameters of another kind begin."""
        before = self._held.keys()
        self._cut_where(kind)
        if self._mine is None or self._held.keys() == before:
            return
        was, pieces = self._mine, self._all_pieces()
        self._mine = None
        now = self._cut_of_this_rank()
        for piece in self._all_pieces():
            # A piece lies within the one that it was cut out of.
            whole = next(w for w in pieces if w.data_ptr() <= piece.data_ptr() < _end(w))
            start = (piece.data_ptr() - whole.data_ptr()) // piece.element_size()
            now.state[piece] = {
                entry: value[start : start + piece.numel()].clone()
                if _is_like(value, whole)
                else _copied(value)
                for entry, value in was.state.get(whole, {}).items()
            }

    def _cut_of_this_rank(self) -> Optimizer:
        """Return the optimizer over this rank's pieces; it is made of ``inner`` if it is not there.

        State that ``inner`` has is cut, and leaves it.
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
                    piece = torch.nn.Parameter(_part(tensor.detach(), place))
                    pieces.append(piece)
                    states[piece] = {
                        entry: _part(value, place).clone()
                        if _is_like(value, tensor)
                        else _copied(value)
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

    def _places(self, tensor: torch.Tensor, rank: int) -> list[Piece]:
        """Return what of an optimizer's tensor lies in a rank's slice, as stretches of it."""
        section = self.flat_parameters.layout.sections[self._held[tensor][0]]
        span = range(section.start, section.start + tensor.numel())
        return [
            place._replace(start=place.start - section.start)
            for place in self._slices.within(span, section.vector, rank)
        ]


def _part(value: torch.Tensor, place: Piece) -> torch.Tensor:
    return value[place.start : place.start + place.length]


def _end(tensor: torch.Tensor) -> int:
    """Return the address behind a vector."""
    return tensor.data_ptr() + tensor.numel() * tensor.element_size()


def _is_like(value: object, tensor: torch.Tensor) -> bool:
    """Return whether an entry has a value for each element."""
    return isinstance(value, torch.Tensor) and value.shape == tensor.shape and value.dim() > 0


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _described(value: Any, piece: torch.Tensor | None) -> list[Any]:
    """Return dtype, shape or "piece", and the plain value of what is no tensor."""
    if not isinstance(value, torch.Tensor):
        return [None, None, value]
    assert piece is not None
    shape = "piece" if _is_like(value, piece) else list(value.shape)
    return [str(value.dtype).removeprefix("torch."), shape, None]
