"""Routes: the messages between stages, forward and backward.

A value goes from its maker, a stage, to every stage that takes the value. The gradient comes back
along a chain, from the last taker through each earlier taker to the maker: every stage adds the sum
of later stages first into its own. This is autograd's order of additions for a model in a single
piece, and floating-point sums depend on the order.

With every shard, a stage also receives a message from its neighbour, with or without values.
Forward, the message has the position of the random stream, passed on from stage to stage. Backward,
the message has the position again, the shard's weight, and gradients of parameters owned by an
earlier stage: of tied parameters, and of parameters used directly by the loss function. These
gradients too are summed from the last stage on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from quorate.replica.pipeline.stage_graph import StageGraph

Names = tuple[str, ...]


class StageRoute(NamedTuple):
    """The messages that a stage sends, and their senders and receivers, by number of the stage."""

    forward_to: Mapping[int, Names]  # values
    forward_from: tuple[int, ...]
    back_to: Mapping[int, Names]  # gradients of values
    back_from: tuple[int, ...]
    owned: Names  # parameters whose gradient the stage writes


def routes(graphs: Sequence[StageGraph]) -> tuple[StageRoute, ...]:
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
            StageRoute(
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
