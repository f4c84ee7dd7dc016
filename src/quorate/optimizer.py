"""Any torch optimizer over flat vectors, where it works element by element.

Such an optimizer does the same to an element whatever tensor it lies in. So the user's own
optimizer object gets, in the place of a group's parameters, the stretches of the flat vectors that
hold them, and one fused kernel updates all of them. Other optimizers (Muon, Adafactor, ...) keep
the ordinary parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from quorate.errors import CheckpointError, SettingError, UserError
from quorate.flat import Flat
from quorate.replica import trainable

OptimizerFactory = Callable[[list[torch.nn.Parameter]], Optimizer]

# Exact types: a subclass may look at shapes.
ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    (
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    )
)
FUSED: frozenset[type[Optimizer]] = frozenset(
    (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
)


class FlatOptimizer:
    """The user's optimizer over the coordinator's flat parameters.

    Args:
        factory: the user's, from a list of parameters to an optimizer.
        model: whose trainable parameters are views of ``parameters``.

    Raises:
        SettingError: the factory does not return an optimizer, or one that cannot work here.
    """

    def __init__(self, factory: OptimizerFactory, model: torch.nn.Module, parameters: Flat) -> None:
        named = trainable(model)
        self.inner = factory(list(named.values()))
        if not isinstance(self.inner, Optimizer):
            raise SettingError(
                "optimizer",
                type(self.inner).__name__,
                "a function from parameters to a torch.optim.Optimizer",
                "for example lambda params: torch.optim.SGD(params, lr=0.1)",
            )
        if isinstance(self.inner, (torch.optim.LBFGS, torch.optim.SparseAdam)):
            raise SettingError(
                "optimizer",
                type(self.inner).__name__,
                "an optimizer that steps from dense gradients alone",
                "take another, SGD or Adam for example",
            )
        self._names = {id(p): name for name, p in named.items()}
        self._parameters = parameters
        self.flat = type(self.inner) in ELEMENTWISE and not any(
            group.get("differentiable") for group in self.inner.param_groups
        )
        # Per optimizer tensor: the names of the parameters it holds, in order.
        self._held: dict[torch.Tensor, list[str]] = {}
        for group in self.inner.param_groups:
            names = [self._name(p) for p in group["params"]]
            if self.flat:
                group["params"] = []
                for stretch, members in parameters.runs(names):
                    tensor = torch.nn.Parameter(stretch)
                    group["params"].append(tensor)
                    self._held[tensor] = members
                real = not any(tensor.is_complex() for tensor in group["params"])
                if type(self.inner) in FUSED and group["fused"] is None and not group["foreach"]:
                    group["fused"] = real
            else:
                self._held.update(
                    (p, [name]) for p, name in zip(group["params"], names, strict=True)
                )

    @property
    def lr(self) -> float:
        """The learning rate of the first group."""
        return float(self.inner.param_groups[0]["lr"])

    def step(self, gradient: Flat) -> None:
        """Update the parameters in place from a gradient of their layout."""
        for tensor, names in self._held.items():
            first = gradient.layout.sections[names[0]]
            if self.flat:
                vector = gradient.vectors[first.vector]
                tensor.grad = vector[first.start : first.start + tensor.numel()]
            else:
                tensor.grad = gradient.views[names[0]]
        self.inner.step()

    def state(self) -> dict[str, dict[str, Any]]:
        """Per parameter name what torch's own state_dict would hold for it.

        Tensors are views of the optimizer's, in the parameter's shape, or scalars.
        """
        found: dict[str, dict[str, Any]] = {}
        for tensor, names in self._held.items():
            values = self.inner.state.get(tensor, {})
            for name in names:
                found[name] = {k: self._cut(v, tensor, names, name) for k, v in values.items()}
        return found

    def load_state(self, state: dict[str, dict[str, Any]]) -> None:
        """Take what ``state`` gave, into tensors of this optimizer.

        Raises:
            CheckpointError: a parameter is missing.
        """
        for tensor, names in self._held.items():
            if missing := [name for name in names if name not in state]:
                raise CheckpointError(f"optimizer state of {missing[0]!r} is missing")
            values: dict[str, Any] = {}
            for entry, example in state[names[0]].items():
                if self.flat and isinstance(example, torch.Tensor) and example.ndim:
                    whole = torch.zeros_like(tensor)
                    for name in names:
                        self._cut(whole, tensor, names, name).copy_(state[name][entry])
                    values[entry] = whole
                elif isinstance(example, torch.Tensor):
                    values[entry] = example.clone()
                else:
                    values[entry] = example
            if values:
                self.inner.state[tensor] = values

    def _cut(self, value: Any, tensor: torch.Tensor, names: list[str], name: str) -> Any:
        if not isinstance(value, torch.Tensor) or value.shape != tensor.shape or not self.flat:
            return value
        sections = self._parameters.layout.sections
        section = sections[name]
        offset = section.start - sections[names[0]].start
        return value.as_strided(section.shape, section.stride, value.storage_offset() + offset)

    def _name(self, parameter: torch.Tensor) -> str:
        name = self._names.get(id(parameter))
        if name is None:
            raise UserError(
                "optimizer: it holds a parameter that is not a trainable one of the model; use "
                "the parameters that the function is given"
            )
        return name
