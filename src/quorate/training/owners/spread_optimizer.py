"""The user's optimizer while owners of slices have its state: ranks of a collective, or servers.

The state is fetched when user code reads it between updates. So a callback that reads or scales
momenta finds all of them, as in a loop of plain torch.
"""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import wraps
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, ClassVar

import torch

from quorate.replica.flat import Flat
from quorate.services.checkpoints.writer import Flush
from quorate.training.optimizing.closure import Closure
from quorate.training.optimizing.entries import Entries, Listing, listing_of, meta_entries
from quorate.training.optimizing.known_optimizers import COUNTERS, OptimizerStates
from quorate.training.optimizing.optimizer import FlatOptimizer
from quorate.training.optimizing.owners import Owners
from quorate.training.owners import slice_files
from quorate.training.owners.slice_files import (
    Flags,
    OwnerValues,
    Row,
    RowPart,
    Rows,
    StateFile,
    StateInMemory,
    WholeState,
)


class SliceOwners(Owners, ABC):
    """Owners that each have a slice of the parameters, and the state of the slice.

    The process that leads calls the methods: rank 0, or the coordinator of servers.
    """

    kind: ClassVar[str]  # the name of an owner in messages
    leader: ClassVar[str]  # the name of the leading process in messages
    # The mark of the host whose leader flushes a file, if owners of further hosts flush the file as
    # soon as they have written their parts; None: all owners flush the file in ``begin_flush``.
    flushed_on: ClassVar[str | None] = None

    @abstractmethod
    def make_slices(self, optimizer: SpreadOptimizer, listing: Listing) -> None:
        """Have each owner make its part of an optimizer's state, with zeros per element. Blocks.

        Args:
            listing: all entries of the state.
        """

    @abstractmethod
    def ask(self, prefix: str, kind: str, **told: Any) -> list[dict[str, Any]]:
        """Send a request to each owner, and return the answers of ``SliceState.answer``. Blocks.

        Args:
            prefix: the prefix of the optimizer, here and in further methods.

        Raises:
            RankError, ServerError: an owner is gone, here and in further methods.
        """

    @abstractmethod
    def swap_rest(self, prefix: str, values: OwnerValues, *, sends: bool) -> None:
        """Send values to the next parts of each owner, or receive the values of the parts. Blocks.

        The parts are those of ``SliceState.next_rest``.

        Args:
            values: by owner; written in place if they are received.
        """

    def describe_slices(self, prefix: str) -> list[Listing]:
        """Return the message of each owner about the entries of its pieces. Blocks."""
        return [answer["state"] for answer in self.ask(prefix, "describe")]

    def move_rows(
        self, prefix: str, rows: Sequence[Row], whole: WholeState, sees: Flags = None
    ) -> None:
        """Move all parts of some rows between the owners' slices and a whole. Blocks.

        Args:
            sees: whether each owner moves blocks of the file itself. None: each owner that sees
                the file does.

        Raises:
            CheckpointError: the file cannot be read.
            OSError: an owner cannot write.
        """
        path, is_read, sections = whole.path, whole.is_read, self.partition.whole.sections
        # 1. By way of memory: entries that a file stores in another order.
        own = Rows(rows, self.partition)
        if isinstance(whole, StateFile):
            strided = [row for row in rows if not slice_files.is_by_rows(sections[row.name])]
            for row in strided:
                with whole.entry(row, sections[row.name]) as entry:
                    self.move_rows(prefix, [row], entry)
            own = Rows([row for row in rows if row not in strided], self.partition)
        # 2. By each owner that sees the file: whole blocks.
        told = {"path": str(path or ""), "is_read": is_read, "rows": own.rows, "sees": sees}
        told["mark"] = slice_files.mark(path) if path is not None and sees is None else None
        told["flushed_on"] = self.flushed_on
        answers = self.ask(prefix, "move", **told)
        for error in (answer["error"] for answer in answers):
            if error is not None:
                raise error
        # 3. By this process: the rest.
        parts = (
            slice_files.chunks(own.parts(owner, blocks=not answer["sees"]))
            for owner, answer in enumerate(answers)
        )
        for each in zip_longest(*parts, fillvalue=list[RowPart]()):
            values = [[whole.begin(part) for part in some] for some in each]
            self.swap_rest(prefix, values, sends=is_read)
            for part, value in zip(chain(*each), chain(*values), strict=True):
                whole.end(part, value)
        # 4. Errors of this process.
        if path is None or is_read:
            return
        if whole.error is not None:
            raise slice_files.named(whole.error, self.leader, path.parent)
        nbytes = Rows(rows, self.partition).nbytes
        moved = whole.nbytes + sum(int(answer["nbytes"]) for answer in answers)
        if moved != nbytes:
            why = f"{self.kind}s have written {moved:,} bytes of {nbytes:,}"
            raise OSError(errno.EIO, why, str(path.parent))

    def begin_flush(self, folder: Path) -> Callable[[Flush], None]:  # noqa: ARG002
        """Begin to flush the files written by all owners.

        Args:
            folder: the directory of the files.

        Returns:
            A function that flushes the files of this process, and returns when all owners have
            flushed; see ``Contents.fill``.
        """
        return lambda flush: flush()


class SpreadOptimizer(FlatOptimizer):
    """The user's optimizer over whole parameters; a ``SliceState`` of each owner makes the steps.

    Before and after the loop of its owners, all of the state is in this process.

    Args:
        factory, model, parameters, names, prefix: see ``FlatOptimizer``.
    """

    unread: Path | None = None  # the file of loaded state that is still on "meta"
    owners: SliceOwners | None = None  # the owners with the newest state; None: this process

    def __init__(self, *over: Any) -> None:
        super().__init__(*over)
        self.is_spread = self.uses_vectors
        if self.is_spread:
            self.user_optimizer.state = LentStates(self._state_of, self.lend)

    def step(
        self, gradient: Flat, missing: Collection[str] = (), closure: Closure | None = None
    ) -> None:
        """Update the parameters in this process: owners have not taken over, or have ended."""
        self.read_all()
        super().step(gradient, missing, closure)

    # --- to the owners, and back ------------------------------------------------------------------

    @property
    def is_away(self) -> bool:
        """True if the owners have the newest state, and this process has none."""
        return self.owners is not None

    def send(self, owners: SliceOwners) -> None:
        """Send each owner its part of the state, from the whole state in this process. Blocks.

        Owners with access to the file read the entries not read yet.
        """
        for tensor in self._names_of:
            tensor.grad = None  # gradients of steps made in this process
        entries, path = self.state(), self.unread
        listing = listing_of(entries)
        owners.make_slices(self, listing)
        whole: WholeState = StateInMemory(entries, is_read=True)
        rows = slice_files.rows_of(listing)
        if path is not None:
            whole = StateFile(path, self.flat_parameters.device, is_read=True)
            rows = slice_files.rows_in(path, listing, self.prefix)
        with closing(whole):
            owners.move_rows(self.prefix, rows, whole)
        dict.clear(self.user_optimizer.state)
        self.owners, self.unread = owners, None

    def fetch(self) -> None:
        """Fetch the state of all owners to this process. Blocks."""
        assert self.owners is not None
        self.put(self.join_listings(self.owners.describe_slices(self.prefix)))
        entries = self.state()
        rows = slice_files.rows_of(listing_of(entries))
        self.owners.move_rows(self.prefix, rows, StateInMemory(entries, is_read=False))

    @contextmanager
    def whole_state(self) -> Iterator[None]:
        """Fetch the state of all parameters into ``state`` inside the block. Blocks."""
        self.read_all()
        if not self.is_away:
            yield
            return
        self.fetch()
        try:
            yield
        finally:
            dict.clear(self.user_optimizer.state)

    def lend(self) -> None:
        """Fetch the state when user code accesses, and may change, the state. Blocks.

        The owners receive the state again before the next update.
        """
        self.read_all()
        self.leave_owners()

    def leave_owners(self) -> None:
        """Fetch the state, and go on in this process alone. Blocks.

        Entries not read yet stay in their file until this process needs them.
        """
        if self.is_away:
            self.fetch()
        self.owners = None

    def join_listings(self, listings: Sequence[Listing]) -> Entries:
        """Return the entries of all parameters; values per element are on "meta".

        Args:
            listings: see ``SliceOwners.describe_slices``.
        """
        assert self.owners is not None
        pieces = self.owners.partition.pieces
        named = [
            [pieces(owner)[int(key)].name, *entry]
            for owner, listing in enumerate(listings)
            for key, *entry in listing
        ]
        return meta_entries(named, self.flat_parameters.layout.sections)

    def load(self, loadable: dict[torch.Tensor, dict[str, Any]]) -> None:
        """Load the result of ``loadable``; each owner receives its part when its loop begins."""
        super().load(loadable)
        self.unread = None

    # --- the state in a file ----------------------------------------------------------------------

    @contextmanager
    def meta_state(self, entries: Entries) -> Iterator[None]:
        """Make ``state`` that of all owners inside the block; values per element are on "meta".

        Args:
            entries: the joined messages of all owners.
        """
        FlatOptimizer.load(self, self.loadable(entries))
        try:
            yield
        finally:
            dict.clear(self.user_optimizer.state)

    @property
    def is_large(self) -> bool:
        """True if the state is too large to be held by a single process."""
        return self.is_spread and slice_files.is_large(self.flat_parameters.layout)

    def is_by_element(self, key: str) -> bool:
        """Return whether a tensor of a checkpoint has a value per element of this optimizer."""
        entry, _, name = key.removeprefix(self.prefix).partition(".")
        return key.startswith(self.prefix) and entry not in COUNTERS and name in self.parameters

    def leave_unread(self, path: Path) -> None:
        """Note the file with the loaded state that is still on "meta", if there is any.

        The file is read when all owners receive their parts, or when all of the state is needed in
        this process.
        """
        values = (value for own in self.state().values() for value in own.values())
        if any(isinstance(value, torch.Tensor) and value.is_meta for value in values):
            self.unread = path.resolve()

    def read_all(self) -> None:
        """Read all entries that are not read yet."""
        path, self.unread = self.unread, None
        if path is None:
            return
        rows = slice_files.rows_in(path, listing_of(self.state()), self.prefix)
        self.put(self.state())
        whole = self.state()
        with closing(StateFile(path, is_read=True)) as file:
            for row in rows:
                into = whole[row.name][row.entry]
                values = torch.empty(into.shape, dtype=into.dtype)
                file.move(values, row)
                into.copy_(values)


class LentStates(OptimizerStates):
    """The states of a spread optimizer; every access by user code fetches all states first.

    This package itself calls the methods of ``dict``, which fetch nothing.

    Args:
        of: see ``OptimizerStates``.
        lend: called before each access.
    """

    def __init__(
        self, of: Callable[[object], dict[str, Any] | None], lend: Callable[[], None]
    ) -> None:
        super().__init__(of)
        self._lend = lend


def _lending(name: str) -> Callable[..., Any]:
    method = getattr(OptimizerStates, name)

    @wraps(method)
    def look(self: LentStates, *values: Any, **named: Any) -> Any:
        self._lend()
        return method(self, *values, **named)

    return look


for _name in (
    *("__getitem__", "__setitem__", "__delitem__", "__contains__", "__iter__", "__len__"),
    *("get", "pop", "popitem", "setdefault", "update", "clear", "keys", "values", "items"),
):
    setattr(LentStates, _name, _lending(_name))
