"""The graph of a forward pass: functions of torch with their inputs, and the calling modules.

The graph is recorded while a shard is computed, by a mode without side effects that sees calls of
torch from Python. So the graph has the branches taken, and loops as often as they ran, and works
where tracing and exporting fail: with any Python code between two operators.
"""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from quorate.replica.loss import Loss
from quorate.replica.nested import parts, tensors
from quorate.replica.placement.call_site import CallSites
from quorate.replica.torch_internals import version

MOST_NODES = 20_000  # a larger graph cannot be viewed

ROWS, CONSTANT, PARAMETER, BUFFER, RESULT = "Rows", "Constant", "Parameter", "Buffer", "Result"
BATCH, LOSS, RESULTS = "batch", "loss_function", "results"  # scopes outside of the model


class GraphNode(NamedTuple):
    """The origin of a tensor: a call of a function, or an input of a forward pass."""

    name: str  # by scopes: ``Net/layer1/0/conv1/conv2d``
    kind: str  # the function, or one of the constants above
    inputs: tuple[str, ...] = ()  # names; "name:1" is the second tensor returned by a function
    shapes: tuple[tuple[int, ...], ...] = ()  # of returned tensors
    dtype: str = ""  # of the first returned tensor: "float32"
    device: str = ""  # of the first returned tensor: "cuda:0"


class ForwardGraph(TorchFunctionMode):
    """The recorder of the graph of forward passes by ``watch``'s loss function; the last counts.

    Nodes are calls by user code and torch's modules: ``cross_entropy``, and not the operators in
    it. Tensors of other origin (C++ code, TorchScript) are constants.

    Args:
        model: the model whose modules are the scopes.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._model = model
        self._root = segment(type(model).__name__)
        self._begin()

    def watch(self, loss: Loss) -> Loss:
        """Return the loss function, recorded from rows to results."""

        def noted(model: torch.nn.Module, batch: Any, *at: Any) -> Any:
            self._begin()
            for path, tensor in _named((BATCH,), batch):
                self._add("/".join(path), ROWS, (), [tensor])
            with self:
                returned = loss(model, batch, *at)
            results = returned if isinstance(returned, Mapping) else {"loss": returned}
            for path, tensor in _named((RESULTS,), results):
                if (origin := self._origin(tensor)) is not None:
                    node = GraphNode("/".join(path), RESULT, (origin,), (tuple(tensor.shape),))
                    self._nodes.append(node._replace(name=self._free(node.name)))
            return returned

        return noted

    def nodes(self) -> list[GraphNode] | None:
        """Return the graph, in the order of calls; None if it is too large to be viewed."""
        return list(self._nodes) if len(self._nodes) < MOST_NODES else None

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [*tensors([args, kwargs])]
        before = [_writes(tensor) for tensor in given]
        returned = func(*args, **kwargs)
        if len(self._nodes) < MOST_NODES:
            written = [t for t, n in zip(given, before, strict=True) if _writes(t) != n]
            self._note(_name(func), given, [*tensors(returned)], written)
        return returned

    def _begin(self) -> None:
        """Forget everything: a shard begins."""
        self._call_sites = CallSites(self._model)
        self._nodes: list[GraphNode] = []
        # By id of the tensor. An id is reused after the end of its tensor, and the graph must not
        # keep activations in memory: so each tensor has a weak reference.
        self._made: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}
        modules = [_scope(self._root, path) for path, _ in self._model.named_modules()]
        self._taken = {BATCH, LOSS, RESULTS, *modules}
        self._parameters = {
            id(tensor): (path, kind)
            for kind, named in (
                (BUFFER, self._model.named_buffers()),
                (PARAMETER, self._model.named_parameters()),
            )
            for path, tensor in named
        }

    def _note(
        self,
        name: str,
        given: list[torch.Tensor],
        returned: list[torch.Tensor],
        written: list[torch.Tensor],
    ) -> None:
        # ``x.to(x.device)`` is x, and makes no tensor; ``x.add_(1)`` is x too, but counts as new.
        # Tensors written and not returned (running statistics) are side effects, except for ``x[0]
        # = 1``.
        kept = {id(tensor) for tensor in given} - {id(tensor) for tensor in written}
        made = [tensor for tensor in returned if id(tensor) not in kept]
        if name == "__setitem__":
            made = written[:1]
        if not made:
            return
        call_site, _ = self._call_sites.find(sys._getframe(2))
        scope = _scope(self._root, call_site.module) if call_site.kind else LOSS
        inputs = [self._origin(tensor) or self._began(tensor, scope) for tensor in given]
        kind = name.strip("_") or name
        self._add(f"{scope}/{kind}", kind, tuple(dict.fromkeys(inputs)), made)

    def _add(self, name: str, kind: str, inputs: tuple[str, ...], made: list[torch.Tensor]) -> str:
        name = self._free(name)
        for number, tensor in enumerate(made):
            output = f"{name}:{number}" if number else name
            self._made[id(tensor)] = weakref.ref(tensor), output
        shapes = tuple(tuple(tensor.shape) for tensor in made)
        dtype = str(made[0].dtype).removeprefix("torch.")
        self._nodes.append(GraphNode(name, kind, inputs, shapes, dtype, str(made[0].device)))
        return name

    def _origin(self, tensor: torch.Tensor) -> str | None:
        """Return the output that a tensor is, if known."""
        reference, output = self._made.get(id(tensor), (None, ""))
        return output if reference is not None and reference() is tensor else None

    def _began(self, tensor: torch.Tensor, scope: str) -> str:
        """Return the node of a tensor that no recorded call has made."""
        if id(tensor) in self._parameters:
            path, kind = self._parameters[id(tensor)]
            return self._add(_scope(self._root, path), kind, (), [tensor])
        return self._add(f"{scope}/constant", CONSTANT, (), [tensor])

    def _free(self, name: str) -> str:
        """Return a name not used by a node or a scope."""
        name = next(
            each
            for each in (f"{name}_{n}" if n else name for n in count())
            if each not in self._taken
        )
        self._taken.add(name)
        return name


def module_tree(model: torch.nn.Module) -> list[GraphNode]:
    """Return a model's modules and parameters as a graph, where a forward pass shows none."""
    root, nodes = segment(type(model).__name__), []
    for path, module in model.named_modules():
        own = []
        for kind, named in (
            (PARAMETER, module.named_parameters(recurse=False)),
            (BUFFER, module.named_buffers(recurse=False)),
        ):
            for name, tensor in named:
                dtype, device = str(tensor.dtype).removeprefix("torch."), str(tensor.device)
                shape = tuple(tensor.shape)
                each = f"{_scope(root, path)}/{segment(name)}"
                own.append(GraphNode(each, kind, (), (shape,), dtype, device))
        nodes += own
        if own or not [*module.children()]:
            kind = segment(type(module).__name__)
            inputs = tuple(node.name for node in own)
            nodes.append(GraphNode(f"{_scope(root, path)}/{kind}", kind, inputs))
    return nodes


def segment(name: object) -> str:
    """Return a name as a part of a node's name: ASCII letters, digits, and ``_.-``."""
    return re.sub(r"[^A-Za-z0-9_.\-]", "_", str(name)) or "_"


def _scope(root: str, path: str) -> str:
    return "/".join([root, *map(segment, path.split("."))]) if path else root


def _named(path: tuple[str, ...], value: Any) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    """Yield the tensors of a nested value, with their paths."""
    if isinstance(value, torch.Tensor):
        yield path, value
    for name, part in parts(value) or ():
        yield from _named((*path, segment(name)), part)


def _writes(tensor: torch.Tensor) -> int:
    """Return the number of in-place writes to a tensor; 0 under inference_mode, without a count."""
    return 0 if tensor.is_inference() else version(tensor)


def _name(func: Any) -> str:
    """Return a function's name; for a read of an attribute, the attribute's name."""
    name = getattr(func, "__name__", type(func).__name__)
    if name == "__get__":  # as for ``tensor.T``
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    return segment(name)
