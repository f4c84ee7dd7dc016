"""The balance of a cut: the modules at which to cut for the fastest slowest stage.

The modules are those called by the model's own forward; if the forward calls only one module, those
called by that module. Each module is measured on a shard, and stages are runs of modules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import nn

from quorate.errors import CutError
from quorate.replica.pipeline.cut import candidates, cut, listed
from quorate.replica.pipeline.measure import Cost, measured
from quorate.replica.pipeline.partition import partition

# one gradient per parameter, and Adam's two vectors
STATE_FACTOR = 2.0

NEARLY = 1.05  # times the slowest stage's time: the usual variation between measurements


@dataclass(frozen=True)
class ModelPieces:
    """The finest cut of a model, measured: piece i ends before ``names[i]``."""

    names: tuple[str, ...]  # (N - 1,) split points
    costs: tuple[Cost, ...]  # (N,)

    def balanced(
        self, stages: int, memory_bytes: float = float("inf"), state_factor: float = STATE_FACTOR
    ) -> tuple[str, ...] | None:
        """Return the split whose slowest stage is fastest; None if no split fits.

        Args:
            stages: number of stages.
            memory_bytes: memory of each device, in bytes.
            state_factor: bytes of optimizer state for a byte of trained parameters.
        """

        def fits(stage: int, first: int, end: int) -> bool:
            taken = memory(self.costs[first:end], stages - stage, state_factor)
            return taken <= memory_bytes

        found = partition([cost.seconds for cost in self.costs], stages, fits)
        return None if found is None else tuple(self.names[begin - 1] for begin in found[0])

    def lightest(self, stages: int) -> tuple[str, ...] | None:
        """Return the split with the smallest largest stage among the nearly fastest splits.

        None if there is no split into this number of stages.
        """
        split = self.balanced(stages)
        if split is None:
            return None
        most_s = NEARLY * self._slowest_s(split)
        while True:
            lighter = self.balanced(stages, self._largest(split) - 1)
            if lighter is None or self._slowest_s(lighter) > most_s:
                return split
            split = lighter

    def _slowest_s(self, split: Sequence[str]) -> float:
        return max(sum(cost.seconds for cost in run) for run in self.runs(split))

    def _largest(self, split: Sequence[str]) -> float:
        runs = self.runs(split)
        return max(memory(run, len(runs) - stage) for stage, run in enumerate(runs))

    def runs(self, split: Sequence[str]) -> list[tuple[Cost, ...]]:
        """Return the costs of the pieces of each stage of a split of these names."""
        edges = [0, *(self.names.index(name) + 1 for name in split), len(self.costs)]
        return [self.costs[a:b] for a, b in pairwise(edges)]


def memory(costs: Sequence[Cost], in_flight: int = 1, state_factor: float = STATE_FACTOR) -> float:
    """Return the least memory of a stage of these pieces, in bytes.

    Args:
        costs: costs of the stage's pieces.
        in_flight: number of shards with kept activations: in the schedule 1f1b, S for the first of
            S stages, 1 for the last.
        state_factor: bytes of optimizer state for a byte of trained parameters.
    """
    fixed = sum(c.parameter_bytes + (1 + state_factor) * c.trained_bytes for c in costs)
    return fixed + in_flight * sum(c.kept_bytes + c.given_bytes for c in costs)


def pieces(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> ModelPieces:
    """Cut a model as finely as possible, and measure the pieces on one shard.

    Raises:
        CutError: the model's forward pass cannot be followed.
    """
    names = candidates(model, args, kwargs)
    try:
        stages = cut(model, names, args, kwargs)
    except CutError:  # a piece may write values read by its neighbour
        names = tuple(name for name in names if _is_possible(model, name, args, kwargs))
        stages = cut(model, names, args, kwargs)
    return ModelPieces(names, measured(model, stages, args, kwargs))


def balanced(
    model: nn.Module, stages: int, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> tuple[str, ...]:
    """Return the names of the modules at which to cut a model into a number of stages.

    Chosen by time, and by memory where times are nearly equal. Measured anew each time, so two
    calls may differ; the results of the stages do not.

    Raises:
        CutError: the model has too few modules, or its forward pass cannot be followed.
    """
    found = pieces(model, args, kwargs)
    split = found.lightest(stages)
    if split is None:
        if not found.names:
            why = f"{stages} stages of a model that calls a single module"
            raise CutError(why, "take one device for a replica")
        why = f"{stages} stages of a model that may be cut at {listed(found.names)}"
        most = f"take at most {len(found.costs)} devices for a replica"
        raise CutError(why, f"{most}, or name modules inside of these with split")
    return split


def _is_possible(
    model: nn.Module, name: str, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> bool:
    try:
        cut(model, [name], args, kwargs)
    except CutError:
        return False
    return True
