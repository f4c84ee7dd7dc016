"""The trace of a model's modules over a shard: inputs, outputs and gradients of each.

Only hashes are kept. Hooks read and change nothing; a tensor hook receives the gradient of the
tensor, so a model with in-place operations is not disturbed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from quorate.replica.loss import Loss
from quorate.replica.nested import tensors
from quorate.replica.witness.values import tensor_text, value_hash


@dataclass(frozen=True)
class Event:
    """An event in the course of one shard."""

    what: str  # "in": a module was called; "out": it returned; "grad": the gradient of an output
    path: str  # the module's name in the model; "" is the model itself
    kind: str  # class of the module
    number: int  # of the call, from 0; for "grad", of the output tensor
    hash: str


class ModuleTrace:
    """Hooks on all modules of a model, inside a ``with`` block.

    Example:
        with ModuleTrace(model) as trace:
            loss = trace.watch(loss_function)(model, batch)
            loss.backward()
        trace.forward, trace.backward
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.forward: list[Event] = []
        self.backward: list[Event] = []
        self._model = model
        self._handles: list[RemovableHandle] = []
        self._begun: Counter[str] = Counter()  # calls of a module so far
        self._open: defaultdict[str, list[int]] = defaultdict(list)  # calls in progress

    def watch(self, loss: Loss) -> Loss:
        """Return a loss function that first clears the trace: a shard may be begun again."""

        def begin(model: torch.nn.Module, batch: Any, *at: Any) -> Any:
            for notes in (self.forward, self.backward, self._begun, self._open):
                notes.clear()
            return loss(model, batch, *at)

        return begin

    def __enter__(self) -> ModuleTrace:
        for path, module in self._model.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):
                self._handles += self._hooks(path, module)
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hooks(self, path: str, module: torch.nn.Module) -> list[RemovableHandle]:
        kind = type(module).__name__

        def called(_module: torch.nn.Module, args: Any, kwargs: Any) -> None:
            number = self._begun[path]
            self._begun[path] += 1
            self._open[path].append(number)
            self.forward.append(Event("in", path, kind, number, value_hash((args, kwargs))))

        def returned(_module: torch.nn.Module, _args: Any, output: Any) -> None:
            number = self._open[path].pop() if self._open[path] else 0
            self.forward.append(Event("out", path, kind, number, value_hash(output)))
            for tensor in tensors(output):
                if tensor.requires_grad:
                    self._watch_gradient(path, kind, tensor)

        return [
            module.register_forward_pre_hook(called, with_kwargs=True),
            module.register_forward_hook(returned),
        ]

    def _watch_gradient(self, path: str, kind: str, tensor: torch.Tensor) -> None:
        key = f"gradient of {path}"
        number = self._begun[key]
        self._begun[key] += 1

        def reached(gradient: torch.Tensor) -> None:
            self.backward.append(Event("grad", path, kind, number, tensor_text(gradient)))

        tensor.register_hook(reached)  # type: ignore[no-untyped-call]
