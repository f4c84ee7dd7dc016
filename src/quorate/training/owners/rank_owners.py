"""The ranks of a collective as owners: each rank has the state of its slices, and updates them.

Optimizers that do not work element by element receive the whole gradient on every rank, and make
the same step on each.
"""

from __future__ import annotations

import errno
import math
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from quorate.engines.collective.exchange import GradientExchange
from quorate.errors import RankError, UserError
from quorate.machine import this_host
from quorate.replica.digest import flat_bytes
from quorate.replica.flat import Flat
from quorate.replica.shard_sum import ShardSum
from quorate.services.checkpoints.writer import Flush
from quorate.training.optimizing.entries import Listing, listing_of, marks
from quorate.training.optimizing.known_optimizers import sent_values, storable_values
from quorate.training.optimizing.mean import Addition, Mean, make_mean
from quorate.training.optimizing.not_finite import not_finite
from quorate.training.optimizing.optimizer import FlatOptimizer
from quorate.training.owners import slice_files
from quorate.training.owners.slice_files import Flags, Row, Rows, StateFile, WholeState
from quorate.training.owners.slice_state import SliceState
from quorate.training.owners.spread_optimizer import SliceOwners, SpreadOptimizer

Trouble = tuple[int, str]  # of a rank: errno and text


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
        self._written: list[StateFile] = []  # not flushed yet
        self._ranks.methods |= {
            "make": self._make,
            "describe": self._describe,
            "sign": self._sign,
            "move": self._move,
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

    def describe_slices(self, prefix: str) -> list[Listing]:
        """Return the message of each rank about the entries of its pieces. Blocks."""
        if self._ranks.is_broken:
            raise RankError("a rank is gone, and with it its part of the optimizer's state")
        found: list[Listing] = self._ranks.call("describe", prefix)
        return found

    def move_rows(self, prefix: str, rows: Sequence[Row], whole: WholeState, sees: Flags) -> None:
        """Move all parts of some rows between slices and a whole: see ``SliceOwners``. Blocks."""
        path = None if whole.path is None else str(whole.path)
        mark = slice_files.mark(whole.path) if whole.path is not None and sees is None else ""
        told = prefix, rows, whole.is_read, path, mark, sees
        self._ranks.tell("move", *told)
        with self._ranks.in_step():
            troubles = self._move(*told, whole=whole)
        for number, text in filter(None, troubles):
            raise OSError(number, text, str(whole.path and whole.path.parent))

    def sign_file(self, path: str, token: bytes) -> list[tuple[int, str]]:
        """Let all ranks sign a file: see ``SliceOwners``. Blocks."""
        self._ranks.tell("sign", path, token)
        return [*enumerate(self._ranks.gather(""))]

    def begin_flush(self, folder: Path) -> Callable[[Flush], None]:
        """Begin to flush the files written by all ranks: see ``SliceOwners``."""
        self._ranks.tell("flush")

        def flush_all(flush: Flush) -> None:
            for number, text in filter(None, self._flushed(flush)):
                raise OSError(number, text, str(folder))

        return flush_all

    # --- slices of the state: the part of this rank -----------------------------------------------

    def _make(self, prefix: str, listing: Listing) -> None:
        optimizer = self._optimizers[prefix]
        groups = zip(optimizer.groups, map(storable_values, optimizer.param_groups), strict=True)
        values = self.partition.views(self.parameters, self.owner)
        pieces = self.partition.pieces(self.owner)
        self._slices[prefix] = own = SliceState(
            type(optimizer.user_optimizer),
            groups,
            [piece for piece in pieces if piece.name in optimizer.parameters],
            Flat(self.partition.layout(self.owner), values),
            optimizer.elements,
        )
        own.put_zeros(listing, self.partition.whole.sections)

    def _describe(self, prefix: str) -> list[Listing]:
        return self._ranks.gather(listing_of(self._slices[prefix].state()))

    def _sign(self, path: str, token: bytes) -> None:
        self._ranks.gather(slice_files.sign(Path(path), token, f"rank {self.owner}", self.owner))

    def _move(
        self,
        prefix: str,
        rows: Sequence[Iterable[Any]],
        is_read: bool,
        path: str | None,
        mark: str,
        sees: Flags,
        whole: WholeState | None = None,
    ) -> list[Trouble | None]:
        """Move this rank's parts, rank 0 the rest too; return the troubles of all ranks. Blocks.

        Args:
            whole: on rank 0 only.
        """
        ranks, me, entries = self._ranks, self.owner, self._slices[prefix].state()
        own = Rows([Row(*row) for row in rows], self.partition)
        file = (
            whole if isinstance(whole, StateFile) else StateFile(Path(path or ""), is_read=is_read)
        )
        if sees is None:
            is_seen = path is not None and (ranks.leads or slice_files.sees(Path(path), mark))
            sees = ranks.gather(is_seen)
        # 1. On each rank that sees the file: whole blocks.
        for part in own.plain.parts(me, beside=False) if sees[me] else ():
            file.move(part.of(entries), part)
        ranks.arrive()  # a disk may be much slower, and exchanges have a time limit

        def swap(values: Iterable[tuple[int, torch.Tensor]], *, sends: bool) -> None:
            addressed = [(rank, flat_bytes(value)) for rank, value in values]
            ranks.swap(*((addressed, []) if sends else ([], addressed)))

        def exchange(each: slice_files.OwnerParts, values: slice_files.OwnerValues) -> None:
            for part, value in zip(each[0], values[0], strict=True):
                target, source = part.of(entries), value
                if not is_read:
                    target, source = source, target
                target.copy_(source)
            # One swap: values of all ranks are on their way at the same time.
            of_others = ((rank, own) for rank in range(1, ranks.size) for own in values[rank])
            swap(of_others, sends=is_read)

        # 2. By rank 0: the rest, sent or received by the other ranks.
        if whole is not None:
            rest = (own.rest(rank, sees=sees[rank]) for rank in range(ranks.size))
            slice_files.move_rest(rest, whole, exchange)
        else:
            for chunk in slice_files.chunks(own.rest(me, sees=sees[me])):
                swap(((0, part.of(entries)) for part in chunk), sends=not is_read)
        ranks.arrive()
        # 3. Errors.
        found = ranks.gather([self._trouble(file.error), file.nbytes])
        troubles, moved = [each for each, _ in found], sum(nbytes for _, nbytes in found)
        if path is not None and not is_read and moved != own.nbytes and not any(troubles):
            troubles[0] = errno.EIO, f"ranks have written {moved:,} bytes of {own.nbytes:,}"
        if whole is None and path is not None:
            self._written.append(file)
        while self._written and (is_read or any(troubles)):
            self._written.pop().close()
        return troubles

    def _flush(self) -> None:
        """Flush the files of this rank in a thread."""
        files, self._written = self._written, []

        def run() -> None:
            with suppress(Exception):  # a rank is lost: the main thread raises the error
                self._flushed(lambda: [*map(StateFile.flush, files)])

        # A daemon: a disk that hangs does not delay the end of the process.
        flushing = threading.Thread(target=run, name="quorate-checkpoints", daemon=True)
        try:
            flushing.start()
        except RuntimeError:  # the system starts no thread at present
            run()

    def _flushed(self, flush: Callable[[], object]) -> list[Trouble | None]:
        """Flush the files of this rank, and return the troubles of all ranks. Blocks."""
        error: Exception | None = None
        try:
            flush()
        except Exception as raised:  # the edge of a thread: all ranks wait for an answer
            error = raised
        return self._ranks.gather(self._trouble(error), beside=True)

    def _trouble(self, error: Exception | None) -> Trouble | None:
        """Return the errno and the text of an error on this rank; None without an error."""
        if error is None:
            return None
        why = getattr(error, "strerror", None) or error
        number = getattr(error, "errno", None) or errno.EIO
        return number, f"rank {self.owner} on {this_host.name()}: {why}"
