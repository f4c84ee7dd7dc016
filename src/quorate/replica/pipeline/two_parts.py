"""A backward pass in two parts: gradients of parameters come later, as no stage waits for them.

Qi, Wan, Huang & Lin, "Zero Bubble Pipeline Parallelism", ICLR 2024 (2401.10241), section 2: most
operators with parameters compute two products in their backward pass, and the previous stage waits
for only the first. torch.distributed.pipelining uses the same two properties of autograd: a
backward pass for some leaves skips nodes without these leaves below, and may begin at any node.

The first part is the backward pass for all leaves but the parameters that are *put off*. The first
part notes the gradients at each *last* node: a node above leaves of both kinds. The second part
begins anew at each of these nodes, and ends at their parameters. So last nodes are computed twice,
each time for different gradients. Parameters are put off only where this gives the bits of a single
pass:

1. A single node is the last node of a parameter, and all further parameters of the node are put off
   too. So no sum of gradients is spread over both parts, as for a parameter used twice, and results
   of one kernel stay together.
2. The last node is of a kind that computes its gradients separately, without a draw (``_KINDS``).
   The node of ``nn.LSTM`` computes all at once: the gradients of its parameters come in the first
   part.
3. Saved tensors are unchanged: no checkpoint recomputes them. No function of user code comes after
   the last node.

All other gradients come in the first part: at worst, all gradients.

At the start of a pass the engine visits all nodes below: for n layers, some n^2 / 2 nodes in the
second part. The second part makes a pass per last node, because a pass from the first would reach
all others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge

from quorate.replica.kernels.products import GradientChoice
from quorate.replica.quick.torch_calls import keeps_plainly

Node = Any  # a node of autograd's graph
Gradients = tuple[torch.Tensor | None, ...]  # of the outputs of a node

# Names of nodes that compute each gradient separately.
_KINDS = frozenset(
    f"{name}Backward0"
    for name in (
        "Add",
        "Addbmm",
        "Addcmul",
        "Addmm",
        "Addmv",
        "Baddbmm",
        "Bmm",
        "Cat",
        "Convolution",
        "Div",
        "Dot",
        "Linear",
        "Mm",
        "Mul",
        "Mv",
        "NativeBatchNorm",
        "NativeGroupNorm",
        "NativeLayerNorm",
        "Stack",
        "Sub",
        "Where",
    )
)
_MOST_ROUNDS = 8  # rounds of the search for parameters to put off


class Root(NamedTuple):
    """A starting point of a backward pass."""

    tensor: torch.Tensor
    gradient: torch.Tensor | None  # None: 1, for a scalar


def derive(roots: Sequence[Root]) -> None:
    """Compute a backward pass in one part."""
    torch.autograd.backward([root.tensor for root in roots], [root.gradient for root in roots])


def derive_first(roots: Sequence[Root], may_wait: Collection[torch.Tensor]) -> SecondPart | None:
    """Compute the first part of a backward pass.

    Args:
        may_wait: parameters whose gradients may come in the second part.

    Returns:
        The second part; None: there is none, gradients of all leaves have been computed.
    """
    graph = _BackwardGraph([root.tensor for root in roots])
    last = graph.last({id(parameter) for parameter in may_wait})
    put_off = {id(parameter) for each in last.values() for parameter in each}
    leaves = [leaf for leaf in graph.leaves if id(leaf) not in put_off]
    if not last or not leaves:
        derive(roots)
        return None
    second = SecondPart(roots, last)
    with second.noting():
        torch.autograd.backward(
            [root.tensor for root in roots],
            [root.gradient for root in roots],
            retain_graph=True,
            inputs=leaves,
        )
    return second


class SecondPart:
    """The second part of a backward pass. Keeps the whole graph alive until computed.

    Args:
        roots: roots of the pass.
        last: the nodes at the beginning of this part, with their parameters.
    """

    def __init__(self, roots: Sequence[Root], last: Mapping[Node, Sequence[torch.Tensor]]) -> None:
        self._roots = [root.tensor for root in roots]  # keeps nodes of Python functions alive
        self._last = last
        self._arrived: dict[Node, Gradients] = {}

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note gradients at last nodes inside the block, and skip those of their parameters."""
        handles = []
        try:
            for node in self._last:
                handles.append(node.register_prehook(self._noter(node)))
                _part(node).wants_parameters = False
            yield
        finally:
            for handle in handles:
                handle.remove()

    def derive(self) -> None:
        """Compute the second part."""
        for node, parameters in self._last.items():
            arrived = self._arrived.pop(node, ())
            given = [(GradientEdge(node, n), g) for n, g in enumerate(arrived) if g is not None]
            if not given:
                continue  # no gradient arrived, so the parameters get none
            part = _part(node)
            part.wants_inputs, part.wants_parameters = False, True
            # Hooks on the node's outputs have changed these gradients already.
            handle = node.register_prehook(lambda _, arrived=arrived: arrived)
            edges, gradients = zip(*given, strict=True)
            torch.autograd.backward(edges, gradients, inputs=parameters)
            handle.remove()
        self._last, self._roots = {}, []

    def _noter(self, node: Node) -> Any:
        def note(gradients: Gradients) -> None:
            self._arrived[node] = gradients

        return note


class _BackwardGraph:
    """The graph below some tensors.

    Args:
        tensors: tensors with gradients.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._roots = [get_gradient_edge(tensor).node for tensor in tensors]
        self._leads_to: dict[Node, list[Node]] = {}
        self._order: list[Node] = []  # nodes, sorted: each after all nodes below
        stack = [(root, False) for root in self._roots]
        while stack:
            node, is_done = stack.pop()
            if is_done:
                self._order.append(node)
            elif node not in self._leads_to:
                below = [each for each, _ in node.next_functions if each is not None]
                self._leads_to[node] = below
                stack.append((node, True))
                stack += [(each, False) for each in below]
        self._leaf_of = {node: node.variable for node in self._order if _is_leaf(node)}

    @property
    def leaves(self) -> list[torch.Tensor]:
        """All leaves, each once."""
        return [*self._leaf_of.values()]

    def last(self, may_wait: set[int]) -> dict[Node, list[torch.Tensor]]:
        """Return last nodes, each with its parameters to put off, by the rules of this module.

        Args:
            may_wait: ids of parameters.
        """
        if any(_is_checkpoint(node) for node in self._order):
            return {}  # a checkpoint supports only a whole backward pass, and raises otherwise
        leaf = {id(tensor): tensor for tensor in self.leaves}
        put_off = {each for each, of in leaf.items() if isinstance(of, torch.nn.Parameter)}
        refused = put_off - may_wait
        for _ in range(_MOST_ROUNDS):
            found = self._found(put_off, refused)
            if not refused:
                return {node: [leaf[each] for each in ids] for node, ids in found.items()}
            put_off -= refused
            refused = set()
        return {}

    def _found(self, put_off: set[int], refused: set[int]) -> dict[Node, set[int]]:
        """Return last nodes with ids of their parameters; add offending ids to ``refused``."""
        below: dict[Node, set[int] | None] = {}  # leaves below a node; None: also leaves to keep
        last: dict[Node, set[int]] = {}
        ends_at: set[int] = set()  # parameters with a last node
        for node in self._order:
            if node in self._leaf_of:
                number = id(self._leaf_of[node])
                below[node] = {number} if number in put_off else None
                continue
            parts = [below[each] for each in self._leads_to[node]]
            waiting = {each for part in parts if part is not None for each in part}
            if waiting and None not in parts:
                below[node] = waiting
                if isinstance(node, BackwardCFunction) or not keeps_plainly(node):
                    refused |= waiting
                continue
            below[node] = None
            if waiting:
                last[node] = waiting
                refused |= waiting if not _is_in_parts(node) else waiting & ends_at
                ends_at |= waiting
        for root in self._roots:
            refused |= below[root] or set()
        for waiting in last.values():
            if waiting & refused:
                refused |= waiting
        return last


def _is_leaf(node: Node) -> bool:
    return type(node).__name__ == "AccumulateGrad"


def _is_checkpoint(node: Node) -> bool:
    return isinstance(node, BackwardCFunction) and "checkpoint" in type(node).__name__.lower()


def _is_in_parts(node: Node) -> bool:
    if isinstance(node, BackwardCFunction):
        return isinstance(getattr(node, "part", None), GradientChoice) and keeps_plainly(node)
    return type(node).__name__ in _KINDS and keeps_plainly(node)


def _part(node: Node) -> GradientChoice:
    """Return the settings of a node of quorate; the engine sets those of torch's nodes."""
    part = getattr(node, "part", None)
    return part if isinstance(part, GradientChoice) else GradientChoice()
