"""The saving and loading of the optimizers of a phase: of one optimizer, or of a list."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from quorate.errors import MisfitError
from quorate.training.optimizing.optimizer_state import LoadableOptimizer, OptimizerState
from quorate.training.optimizing.update import Update


class PhaseState:
    """The states of the optimizers of a phase.

    In the record of a checkpoint, the states of a list of optimizers form a list, and the name of a
    tensor is prefixed with the number of its optimizer and a slash.

    Args:
        update: makes the updates of the phase.
        states: the state of each optimizer, in order.
    """

    def __init__(self, update: Update, states: Sequence[OptimizerState]) -> None:
        self._update, self._states = update, states

    @property
    def kind(self) -> str:
        """The optimizers as text for people, compared first by a resume."""
        return " + ".join(state.kind for state in self._states)

    def save(self, *, with_sharded: bool) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return tensors by name and entries of the record; see ``Phases.save``.

        Raises:
            CheckpointError: an optimizer holds state that cannot be saved.
        """
        if not self._update.optimize.has_several:
            return self._states[0].save(with_sharded=with_sharded)
        tensors, facts = dict[str, torch.Tensor](), self._update.facts()["optimizers"]
        for number, (entry, own) in enumerate(zip(facts, self._states, strict=True)):
            state, kept = own.save(with_sharded=with_sharded)
            tensors |= {f"{number}/{key}": value for key, value in state.items()}
            entry |= kept
        return tensors, {"optimizer": self.kind, "optimizer_numbers": {}, "optimizers": facts}

    def loadable(
        self, tensors: Mapping[str, torch.Tensor], record: Mapping[str, Any], path: Path
    ) -> list[LoadableOptimizer]:
        """Return the argument of ``load``, made from the result of ``save``. Nothing is changed.

        Raises:
            MisfitError: the state is of other optimizers.
        """
        several, saved = self._update.optimize.has_several, record.get("optimizers")
        if several != (saved is not None):
            was, now = ("a list of optimizers", "one function")[:: -1 if several else 1]
            fix = "use the same, or choose another run_dir"
            raise MisfitError(path, f"it was trained with {was}, and this run has {now}", fix=fix)
        if saved is None:
            return [self._states[0].loadable(tensors, record, path)]
        parts = by_prefix(tensors, [*map(str, range(len(self._states)))], "optimizer", path)
        return [
            state.loadable(own, {**entry, "global_step": record["global_step"]}, path)
            for state, own, entry in zip(self._states, parts.values(), saved, strict=True)
        ]

    def load(self, saved: Sequence[LoadableOptimizer]) -> None:
        """Load the result of ``loadable``, except for values now set differently by the script."""
        for state, own in zip(self._states, saved, strict=True):
            state.load(own)


def by_prefix(
    tensors: Mapping[str, torch.Tensor], prefixes: Collection[str], of: str, path: Path
) -> dict[str, dict[str, torch.Tensor]]:
    """Return tensors by the prefix of their names, without the prefix and its slash.

    Args:
        of: the kind of thing that a prefix names, for messages.

    Raises:
        MisfitError: a tensor has another prefix.
    """
    parts: dict[str, dict[str, torch.Tensor]] = {prefix: {} for prefix in prefixes}
    for key, value in tensors.items():
        prefix, _, own = key.partition("/")
        if prefix not in parts:
            raise MisfitError(path, f"optimizer state {key!r:.80} is of no {of}")
        parts[prefix][own] = value
    return parts
