"""The user's optimizer while owners of slices have its state: ranks of a collective, or servers.

The state is fetched when user code reads it between updates. So a callback that reads or scales
momenta finds all of them, as in a loop of plain torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, ClassVar

import torch

from quorate.replica.sparse.found import Found, no_rows
from quorate.training.optimizing.entries import Entries, Listing, listed, outlined, vectors
from quorate.training.optimizing.known_optimizers import COUNTERS, States
from quorate.training.optimizing.optimizer import FlatOptimizer
from quorate.training.owners import slice_files
from quorate.training.owners.slice_files import StateFile


class SpreadOptimizer(FlatOptimizer, ABC):
    """The user's optimizer over whole parameters; a ``SliceState`` of each owner makes the steps.

    Args: see ``FlatOptimizer``.
    """

    refuses_rows: ClassVar[tuple[str, str]]  # setting and value that refuse gradients by rows
    unread: Path | None = None  # the file of loaded state that is still on "meta"
    is_lent = False  # whether user code has received the state, and may have changed it

    def kept_by_rows(self, found: Found) -> frozenset[str]:
        """Return no names: owners have slices of vectors.

        Raises:
            SettingError: the optimizer takes some parameter's gradient by rows.
        """
        if kept := super().kept_by_rows(found):
            raise no_rows(*self.refuses_rows, min(kept))
        return kept

    @property
    @abstractmethod
    def is_away(self) -> bool:
        """True if the owners have the newest state, and this process has none."""

    @abstractmethod
    def fetch(self) -> None:
        """Fetch the state of all owners to this process. Blocks."""

    @contextmanager
    def whole(self) -> Iterator[None]:
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
        """Fetch the state when user code accesses the state between updates. Blocks."""
        self.read_all()
        if self.is_away:
            self.fetch()
            self.is_lent = True

    def joined(self, listings: Sequence[Listing]) -> Entries:
        """Return the entries of all parameters; values per element are on "meta".

        Args:
            listings: message of each owner about the entries of its pieces; see ``entries``.
        """
        named = [
            [self.partition.pieces(owner)[int(key)].name, *entry]
            for owner, listing in enumerate(listings)
            for key, *entry in listing
        ]
        return outlined(named, self.flat_parameters.layout.sections)

    def load(self, loadable: dict[torch.Tensor, dict[str, Any]]) -> None:
        """Load the result of ``loadable``; each owner receives its part at the next step."""
        super().load(loadable)
        self.unread = None

    # --- the state in a file ----------------------------------------------------------------------

    @contextmanager
    def outlined(self, entries: Entries) -> Iterator[None]:
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
        return slice_files.is_large(self.flat_parameters.layout)

    def is_by_element(self, key: str) -> bool:
        """Return whether a tensor of a checkpoint has a value per element of this optimizer."""
        entry, _, name = key.removeprefix(self.prefix).partition(".")
        return key.startswith(self.prefix) and entry not in COUNTERS and name in self.parameters

    def leave_unread(self, path: Path) -> None:
        """Note the file with the loaded state that is still on "meta", if there is any.

        The file is read when all owners receive their parts, or when all of the state is needed in
        this process.
        """
        entries = self.state()
        if any(value.is_meta for value in vectors(entries, listed(entries))):
            self.unread = path.resolve()

    def read_all(self) -> None:
        """Read all entries that are not read yet."""
        path, self.unread = self.unread, None
        if path is None:
            return
        rows = slice_files.rows_in(path, listed(self.state()), self.prefix)
        self.put(self.state())
        whole = self.state()
        with closing(StateFile(path, is_read=True)) as file:
            for row in rows:
                into = whole[row.name][row.entry]
                values = torch.empty(into.shape, dtype=into.dtype)
                file.move(values, row)
                into.copy_(values)


class LentStates(States):
    """The states of a spread optimizer; every access by user code fetches all states first.

    This package itself calls the methods of ``dict``, which fetch nothing.

    Args:
        of: see ``States``.
        lend: called before each access.
    """

    def __init__(
        self, of: Callable[[object], dict[str, Any] | None], lend: Callable[[], None]
    ) -> None:
        super().__init__(of)
        self._lend = lend


def _lending(name: str) -> Callable[..., Any]:
    method = getattr(States, name)

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
