"""Routes: which stage sends what to which, forward and backward.

A value goes from the stage that makes it to every stage that takes it. Its gradient comes back
along a chain, from the last stage that takes it over each one before to the one that made it: every
stage puts what comes from later ones first into its own sum. That is the order in which autograd
adds where the model is in one piece, and floating-point sums depend on it. A parameter that several
stages use is a value that nobody makes: its gradient ends with the first of them, which has it.

With every shard a stage also hears from its neighbour, whatever values there are: the position of
the random stream goes from stage to stage, and so does the shard's weight on the way back.
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
    back_to: Mapping[int, tuple[Names, Names]]  # gradients of values, and of tied parameters
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
    tied = {name: chain for name, chain in uses.items() if len(chain) > 1}
    forward = _edges((chain[0], to, name) for name, chain in values.items() for to in chain[1:])
    back, tied_back = _edges(_steps_back(values)), _edges(_steps_back(tied))
    found = []
    for stage in stages:
        forward_to = {to: forward.get((stage, to), ()) for to in stages[stage + 1 :]}
        back_to = {
            to: (back.get((stage, to), ()), tied_back.get((stage, to), ())) for to in stages[:stage]
        }
        found.append(
            Route(
                {to: names for to, names in forward_to.items() if names or to == stage + 1},
                tuple(s for s in stages[:stage] if (s, stage) in forward or s == stage - 1),
                {to: both for to, both in back_to.items() if any(both) or to == stage - 1},
                tuple(
                    s
                    for s in stages[stage + 1 :]
                    if {(s, stage)} & (back.keys() | tied_back.keys()) or s == stage + 1
                ),
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
