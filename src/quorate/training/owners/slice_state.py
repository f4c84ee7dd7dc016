"""The state of one owner's slice: an optimizer of the user's kind over pieces of the parameters.

An element-wise optimizer treats an element of a piece as in the whole parameter. Independent of
engines: a rank has such a state for its own slice, and a server for the slice it serves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from quorate.engines.partition import Partition
from quorate.errors import CheckpointError
from quorate.machine import this_host
from quorate.replica.flat import Flat
from quorate.training.optimizing.entries import Listing, listing_of, meta_entries, of_pieces
from quorate.training.optimizing.known_optimizers import put_values
from quorate.training.optimizing.optimizer import FlatOptimizer
from quorate.training.owners import slice_files
from quorate.training.owners.slice_files import Row, Rows, StateFile

NOTHING = StateFile(Path(), is_read=False)  # no file: it is never opened


class SliceState(FlatOptimizer):
    """An element-wise optimizer of torch over the pieces of an owner.

    Args:
        kind: the class of the user's optimizer.
        groups: names of the parameters and values of each of the user's groups.
        partition: of the parameters among all owners.
        owner: the number of the owner.
        who: the owner in words: "rank 1".
        parameters: the values of the owner's pieces, by key.
        elements: P of the whole vectors.
    """

    def __init__(
        self,
        kind: type[Optimizer],
        groups: Iterable[tuple[Sequence[str], Mapping[str, Any]]],
        partition: Partition,
        owner: int,
        who: str,
        parameters: Flat,
        elements: int,
    ) -> None:
        self._partition, self._owner, self._who = partition, owner, who
        self._written = NOTHING  # not flushed yet
        named = {key: torch.nn.Parameter(view) for key, view in parameters.views.items()}
        self._keys: defaultdict[str, list[str]] = defaultdict(list)  # by parameter
        for piece in partition.pieces(owner):
            self._keys[piece.name].append(piece.key)
        own = [
            {**values, "params": [named[key] for name in names for key in self._keys[name]]}
            for names, values in groups
        ]
        made = kind(own)  # type: ignore[call-arg]
        super().__init__(lambda _: made, torch.nn.ParameterDict(named), parameters)
        self.elements = elements

    def put_zeros(self, listing: Listing) -> None:
        """Replace the state by the part of this owner, with zeros for values per element.

        Args:
            listing: the entries of whole parameters.
        """
        entries = meta_entries(listing, self._partition.whole.sections)
        self.put(of_pieces(entries, self._partition.pieces(self._owner)))

    def update(
        self, mean: Flat, missing: Collection[str], groups: Iterable[Mapping[str, Any]]
    ) -> None:
        """Update the parameters of the slice.

        Args:
            mean: the mean gradient, by pieces.
            missing: the user's parameters without a gradient.
            groups: values of the user's groups; see ``sent_values``.
        """
        for group, values in zip(self.param_groups, groups, strict=True):
            put_values(group, values)
        self.step(mean, {key for name in missing for key in self._keys[name]})

    # --- between this owner and a whole -----------------------------------------------------------

    def answer(self, kind: str, told: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a request of the leader; see ``SliceOwners.ask``.

        Raises:
            ValueError: a request of another kind.
        """
        match kind:
            case "describe":
                return {"state": listing_of(self.state())}
            case "sign":
                path, token = Path(told["path"]), told["token"]
                return {"why": slice_files.sign(path, token, self._who, self._owner)}
            case "move":
                return self._move(told)
        raise ValueError(f"{self._who} was asked for {kind!r}")

    def _move(self, told: Mapping[str, Any]) -> dict[str, Any]:
        """Move whole blocks between the slice and a file, if this owner sees the file."""
        path, mark, sees = Path(told["path"]), told["mark"], told["sees"]
        rows = Rows([Row(*row) for row in told["rows"]], self._partition)
        is_seen = mark is not None and slice_files.sees(path, mark)
        if sees is not None:
            is_seen = sees[self._owner]
        entries, error = self.state(), None
        file = StateFile(path, is_read=told["is_read"])
        try:
            for part in rows.parts(self._owner, beside=False) if is_seen else ():
                file.move(part.of(entries), part)
            if not file.is_read and told["flushed_on"] not in (None, this_host.mark()):
                file.flush()
        except (CheckpointError, OSError) as raised:
            error = raised
        error = file.error or error
        if file.is_read or error is not None or told["flushed_on"] is not None:
            file.close()
        else:
            self.take_written().close()
            self._written = file
        if isinstance(error, OSError):
            error = slice_files.named(error, self._who, path.parent)
        self._rest = slice_files.chunks(rows.parts(self._owner, blocks=not is_seen))
        return {"sees": is_seen, "error": error, "nbytes": file.nbytes}

    def take_written(self) -> StateFile:
        """Return the file written last, for the caller to flush; at most once each file."""
        file, self._written = self._written, NOTHING
        return file

    def next_rest(self) -> list[torch.Tensor]:
        """Return the next values that the leader moves, as views; empty after the last."""
        entries = self.state()
        return [part.of(entries) for part in next(self._rest, [])]
