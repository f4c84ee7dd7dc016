"""Routes: which stage sends what to which, forward and backward.

A value goes from the stage that makes it to every stage that takes it. Its gradient comes back
along a chain, from the last stage that takes it over each one before to the one that made it: every
stage puts what comes from later ones first into its own sum. That is the order in which autograd
adds where the model is in one piece, and floating-point sums depend on it.

With every shard a stage also hears from its neighbour, whatever values there are. Forward it is
told the position of the random stream, which goes from stage to stage. Back it is told that again,
the shard's weight, and gradients of parameters that are those of an earlier stage: of tied ones,
and of such as the loss function uses by itself. These too are summed from the last stage on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from quorate.replica.pipeline.stage_graph import StageGraph

Names = tuple[str, ...]


class Route(NamedTuple):
    """What one stage sends, and whom it hears from. Stages by their numbers."""

    forward_to: Mapping[int, Names]  # values
    forward_from: tuple[int, ...]
    back_to: Mapping[int, Names]  # gradients of values
    back_from: tuple[int, ...]
    owned: Names  # parameters whose gradient it writes


def routes(graphs: Sequence[StageGraph]) -> tuple[Route, ...]:
    """Return the route of each stage."""
    stages, last = range(len(graphs)), len(graphs) - 1
    values = {name: [graph.index] for graph in graphs[:last] for name in graph.gives}
    uses: dict[str, list[int]] = {}
    for graph in graphs:
        for name in graph.takes:
            if name in values:
                values[name].append(graph.index)
        for name in dict.fromkeys((*graph.parameters, *graph.shared)):
            uses.setdefault(name, []).append(graph.index)
    forward = _edges((chain[0], to, name) for name, chain in values.items() for to in chain[1:])
    back = _edges(_steps_back(values))
    found = []
    for stage in stages:
        forward_to = {to: forward.get((stage, to), ()) for to in stages[stage + 1 :]}
        back_to = {to: back.get((stage, to), ()) for to in stages[:stage]}
        found.append(
            Route(
                {to: names for to, names in forward_to.items() if names or to == stage + 1},
                tuple(s for s in stages[:stage] if (s, stage) in forward or s == stage - 1),
                {to: names for to, names in back_to.items() if names or to == stage - 1},
                tuple(s for s in stages[stage + 1 :] if (s, stage) in back or s == stage + 1),
                tuple(name for name, chain in uses.items() if chain[0] == stage),
            )
        )
    return tuple(found)


def _steps_back(chains: Mapping[str, Sequence[int]]) -> Iterator[tuple[int, int, str]]:
    for name, chain in chains.items():
        for to, sender in pairwise(chain):
            yield sender, to, name


def _edges(steps: Iterable[tuple[int, int, str]]) -> dict[tuple[int, int], Names]:
    edges: dict[tuple[int, int], Names] = {}
    for sender, to, name in steps:
        edges[sender, to] = (*edges.get((sender, to), ()), name)
    return edges
