"""The state of one owner's slice: an optimizer of the user's kind over pieces of the parameters.

An element-wise optimizer treats an element of a piece as in the whole parameter. Independent of
engines: a rank has such a state for its own slice, and a server for the slice it serves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from quorate.engines.partition import Piece
from quorate.replica.flat import Flat, Section
from quorate.training.optimizing.entries import Listing, meta_entries, of_pieces
from quorate.training.optimizing.known_optimizers import put_values
from quorate.training.optimizing.optimizer import FlatOptimizer


class SliceState(FlatOptimizer):
    """An element-wise optimizer of torch over the pieces of an owner.

    Args:
        kind: the class of the user's optimizer.
        groups: names of the parameters and values of each of the user's groups.
        pieces: the pieces of the owner.
        parameters: the values of the pieces, by key.
        elements: P of the whole vectors.
    """

    def __init__(
        self,
        kind: type[Optimizer],
        groups: Iterable[tuple[Sequence[str], Mapping[str, Any]]],
        pieces: Sequence[Piece],
        parameters: Flat,
        elements: int,
    ) -> None:
        named = {key: torch.nn.Parameter(view) for key, view in parameters.views.items()}
        self._own_pieces = pieces
        self._keys: defaultdict[str, list[str]] = defaultdict(list)  # by parameter
        for piece in pieces:
            self._keys[piece.name].append(piece.key)
        own = [
            {**values, "params": [named[key] for name in names for key in self._keys[name]]}
            for names, values in groups
        ]
        made = kind(own)  # type: ignore[call-arg]
        super().__init__(lambda _: made, torch.nn.ParameterDict(named), parameters)
        self.elements = elements

    def put_zeros(self, listing: Listing, sections: Mapping[str, Section]) -> None:
        """Replace the state by the part of this owner, with zeros for values per element.

        Args:
            listing: the entries of whole parameters.
            sections: places of the whole parameters.
        """
        self.put(of_pieces(meta_entries(listing, sections), self._own_pieces))

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
