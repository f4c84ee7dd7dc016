"""An optimizer over a collective: each rank has the state of its slice, and updates the slice.

An element-wise optimizer treats an element of a slice as in a whole vector. All further optimizers
receive the whole gradient on every rank, and make the same step on each.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from quorate.engines.collective.exchange import GradientExchange
from quorate.errors import RankError, UserError
from quorate.replica.flat import Flat
from quorate.replica.sparse.found import Found, no_rows
from quorate.training.collective.reading import Unread, read, read_whole, sees
from quorate.training.collective.rows import Row, is_large
from quorate.training.optimizing.block_steps import step_flat
from quorate.training.optimizing.closure import Closure
from quorate.training.optimizing.cut_optimizer import CutOptimizer
from quorate.training.optimizing.entries import (
    described,
    is_like,
    marks,
    part,
    told,
)
from quorate.training.optimizing.known_optimizers import COUNTERS, fill_momenta
from quorate.training.optimizing.lent_states import LentStates
from quorate.training.optimizing.optimizer import OptimizerFactory


class SlicedOptimizer(CutOptimizer):
    """The user's optimizer, stepped by all ranks together.

    Args:
        factory: the user's function from a list of parameters to an optimizer.
        model: the model; its trainable parameters are views of ``parameters``.
        parameters: this rank's parameters, whole.
        exchange: the exchange of their gradients.
        is_sharded: whether each rank has the state for its slices alone, if the optimizer works
            element by element.
        names: names of the optimizer's parameters; not if sharded. Default: all.

    Raises:
        SettingError: the factory returns no optimizer, or an optimizer unusable with any engine.
    """

    def __init__(
        self,
        factory: OptimizerFactory,
        model: torch.nn.Module,
        parameters: Flat,
        *,
        exchange: GradientExchange,
        is_sharded: bool,
        names: Collection[str] | None = None,
    ) -> None:
        super().__init__(factory, model, parameters, exchange.slices, names)
        self._exchange = exchange
        self.is_sharded = is_sharded and self.flat
        self._is_alone = False
        self._noted: list[Any] = []
        self._unread: Unread | None = None
        if self.is_sharded:
            self.inner.state = LentStates(self._state_of, self._lend)
            exchange.ranks.methods |= {"gather": self.gather, "take_part": self.take_part}

    def kept_by_rows(self, found: Found) -> frozenset[str]:
        """Return no names: ranks exchange slices of vectors.

        Raises:
            SettingError: the optimizer takes some parameter's gradient by rows.
        """
        if kept := super().kept_by_rows(found):
            raise no_rows("engine", "collective", min(kept))
        return kept

    def whole_of(self, gradient: Flat) -> Flat:
        """Return the whole gradient, gathered from the slices of all ranks, in new memory. Blocks.

        All ranks call the method.
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
            closure: with a closure, the gradient is a whole gradient returned by ``whole_of``.
        """
        with self._inside():
            if self._is_alone or closure is not None:
                super().step(gradient, missing, closure)
            elif not self.is_sharded:
                super().step(self.whole_of(gradient), missing)
            else:
                self._step(gradient, missing)

    def _step(self, gradient: Flat, missing: Collection[str]) -> None:
        """Update this rank's pieces, and exchange them."""
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
        step_flat(own, self.elements)
        self.inner.step()  # no tensor has a gradient: only a schedule counts it
        self._exchange.spread(self.flat_parameters)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Gather the state of all ranks on rank 0 inside the block, as if there were one rank."""
        with self._inside():
            if self._mine is None or self.is_lent:  # no step yet, or all of the state is present
                self._read_all()
                yield
                return
            self._ask()
            try:
                yield
            finally:
                self.inner.state.clear()

    def stay_alone(self) -> None:
        """Gather all state on rank 0, and go on there without further ranks."""
        with self._inside():
            if self._mine is not None and not self.is_lent:
                self._ask()
            self._read_all()
        self._mine, self._own_pieces, self._is_alone = None, {}, True
        self.is_lent = False

    def state(self) -> dict[str, dict[str, Any]]:
        """Return the part of the state on this rank; see ``whole``."""
        with self._inside():
            return super().state()

    def loadable(self, state: dict[str, dict[str, Any]]) -> dict[torch.Tensor, dict[str, Any]]:
        """Return the argument of ``load``; see ``FlatOptimizer``."""
        with self._inside():
            return super().loadable(state)

    def load(self, loadable: dict[torch.Tensor, dict[str, Any]]) -> None:
        """Load the result of ``loadable``; at the next step, this rank keeps its own part alone."""
        self._unread = None
        with self._inside():
            super().load(loadable)
        self._mine, self._own_pieces = None, {}

    def scatter(self) -> None:
        """Send each rank its part of the state, from the whole state on rank 0. Blocks.

        Rank 0 keeps its own part. Each rank with access to the file reads the entries not read yet.
        """
        ranks, tensors = self._slices.ranks, [*self._held]
        unread, rows = self._unread, list[Row]()
        with self._inside():
            header: list[list[Any]] = []  # number of the tensor, name of the entry, description
            values: list[tuple[torch.Tensor, torch.Tensor]] = []
            for number, tensor in enumerate(tensors):
                for entry, value in self.inner.state.get(tensor, {}).items():
                    header.append([number, entry, *told(value, tensor)])
                    if is_like(value, tensor) and not value.is_meta:
                        values.append((tensor, value))
            record: dict[str, Any] = {"held": self.held, "state": header}
            if unread is not None:
                rows = unread.rows(self.held, self._unread_entries())
                record["unread"] = {"path": str(unread.path), "mark": unread.mark(), "rows": rows}
            ranks.tell("take_part", record)
            reads = ranks.gather(True)
            for tensor, value in values:
                for rank in range(1, ranks.size):
                    places = self._places(tensor, rank)
                    ranks.swap([(rank, part(value, place)) for place in places], [])
            self._mine = None
            self._cut_of_this_rank()
            if unread is not None:
                read(ranks, self, unread.path, rows, reads)
        self.is_lent, self._unread = False, None

    def take_part(self, record: dict[str, Any]) -> None:
        """Receive this rank's part of the state from ``scatter``, and drop the present state.

        Blocks.
        """
        ranks = self._slices.ranks
        number_of = {name: number for number, names in enumerate(record["held"]) for name in names}
        self.inner.state.clear()
        self._cut_where(number_of.__getitem__)
        self._mine = None
        own, tensors = self._cut_of_this_rank(), [*self._held]
        unread = record.get("unread", {"path": "", "mark": "", "rows": []})
        path, rows = Path(unread["path"]), [Row(*row) for row in unread["rows"]]
        is_seen = bool(rows) and sees(path, unread["mark"])
        reads = ranks.gather(is_seen)
        are_unread = {(row.number, row.entry) for row in rows}
        for number, entry, dtype, plain, on in record["state"]:
            pieces = self._own_pieces[tensors[number]]
            if plain == "piece":
                taken = [torch.empty_like(p.detach(), dtype=getattr(torch, dtype)) for p in pieces]
                if (number, entry) not in are_unread:
                    ranks.swap([], [(0, value) for value in taken])
                for piece, value in zip(pieces, taken, strict=True):
                    own.state[piece][entry] = value
                continue
            for piece in pieces:
                own.state[piece][entry] = (
                    plain
                    if dtype is None
                    else torch.tensor(
                        plain,
                        dtype=getattr(torch, dtype),
                        device=piece.device if on == "device" else "cpu",
                    )
                )
        if rows:
            read(ranks, self, path, rows, reads)

    @property
    def is_large(self) -> bool:
        """True if the state is too large to be held by a single rank."""
        return self.is_sharded and is_large(self.flat_parameters.layout)

    def is_by_element(self, key: str) -> bool:
        """Return whether a tensor from ``OptimizerState.save`` has a value per element."""
        entry, _, name = key.partition(".")
        return entry not in COUNTERS and name in self.parameters

    def leave_unread(self, path: Path) -> None:
        """Note the file with the loaded state that is still on "meta", if there is any.

        The file is read when all ranks receive their parts, or when all of the state is needed on
        this rank.
        """
        with self._inside():
            self._unread = Unread(path.resolve()) if self._unread_entries() else None

    def _unread_entries(self) -> list[tuple[int, str]]:
        return [
            (number, entry)
            for number, tensor in enumerate(self._held)
            for entry, value in self.inner.state.get(tensor, {}).items()
            if is_like(value, tensor) and value.is_meta
        ]

    def _read_all(self) -> None:
        """Read all entries that are not read yet."""
        unread, self._unread = self._unread, None
        if unread is None:
            return
        sections, tensors = self.flat_parameters.layout.sections, [*self._held]
        with self._inside():
            for row in unread.rows(self.held, self._unread_entries()):
                tensor = tensors[row.number]
                names = self._held[tensor]
                whole = torch.zeros_like(tensor, dtype=getattr(torch, row.dtype))
                for which, name in enumerate(names):
                    place = self._cut(whole, tensor, names, name)
                    read_whole(unread.path, row, sections[name], which, place)
                self.inner.state[tensor][row.entry] = whole

    def gather(self) -> None:
        """Send this rank's state to rank 0, to be assembled there. All ranks call the method."""
        ranks, tensors = self._slices.ranks, [*self._held]
        assert self._mine is not None
        own: list[torch.Tensor] = []
        header: list[list[Any]] = []  # of tensor number, piece index, entry, description
        for number, tensor in enumerate(tensors):
            for which, piece in enumerate(self._own_pieces.get(tensor, ())):
                for entry, value in self._mine.state.get(piece, {}).items():
                    header.append([number, which, entry, *described(value, piece)])
                    if isinstance(value, torch.Tensor):
                        own.append(value.contiguous())
        headers = ranks.gather(header)
        if not ranks.leads:
            ranks.swap([(0, value) for value in own], [])
            return
        takes: list[tuple[int, torch.Tensor]] = []
        state: dict[torch.Tensor, dict[str, Any]] = {}
        values = iter(own)
        for rank, listed in enumerate(headers):
            for number, which, entry, dtype, shape, plain, on in listed:
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
                    device = torch.device("cpu") if on == "cpu" else tensor.device
                    entries[entry] = torch.zeros(size, dtype=kind, device=device)
                whole = entries[entry]
                target = part(whole, place) if is_piece else torch.empty_like(whole)
                if rank == 0:
                    target.copy_(next(values))
                else:
                    takes.append((rank, target))
                if not is_piece:
                    entries[entry] = target  # counters, the same on all ranks
        ranks.swap([], takes)
        self.inner.state.clear()
        self.inner.state.update(state)

    def note_state(self) -> None:
        """Note the state that each rank holds by itself, before user code runs."""
        self._noted = [] if self.is_sharded else marks(self.inner.state)

    def require_same_state(self) -> None:
        """Check that user code has not changed, on this rank alone, state held by every rank.

        Raises:
            UserError: user code has changed such state.
        """
        if not self.is_sharded and not self._is_alone and marks(self.inner.state) != self._noted:
            raise UserError(
                "optimizer",
                f"the state of {type(self.inner).__name__} was changed between updates, but each "
                "rank holds "
                "its own part of the state",
                fix="change the state in the optimizer's step(), or pass engine='processes'",
            )

    def _lend(self) -> None:
        """Gather all of the state on rank 0 when user code reads the state between updates."""
        if not self._is_ours:
            self._read_all()
        if self._is_ours or self.is_lent or self._mine is None or not self._slices.ranks.leads:
            return
        with self._inside():
            self._ask()
        self.is_lent = True

    def _ask(self) -> None:
        """Gather on rank 0, after telling the other ranks to take part."""
        if self._slices.ranks.is_broken:
            raise RankError("a rank is gone, and with it its part of the optimizer's state")
        self._slices.ranks.call("gather")
