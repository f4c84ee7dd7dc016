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
from quorate.replica.flat import Flat
from quorate.replica.model import trainable

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
# What torch's optimizers keep once per tensor and not per element. A name is needed to tell: the
# moments of a parameter without dimensions are scalars too.
COUNTERS = frozenset(("step", "eta", "mu", "mu_product"))


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
        self.parameters = parameters
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
                if type(self.inner) in FUSED and _leaves_it_open(group):
                    group["fused"] = True
            else:
                self._held.update(
                    (p, [name]) for p, name in zip(group["params"], names, strict=True)
                )

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.parameters.device

    @property
    def elements(self) -> int:
        """P, over all dtypes."""
        return sum(self.parameters.layout.sizes)

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
        state: dict[str, dict[str, Any]] = {}
        for tensor, names in self._held.items():
            values = self.inner.state.get(tensor, {})
            for name in names:
                state[name] = {k: self._cut(v, tensor, names, name) for k, v in values.items()}
        return state

    def load_state(self, state: dict[str, dict[str, Any]]) -> None:
        """Take what ``state`` gave, into tensors of this optimizer.

        Raises:
            CheckpointError: the groups were others: parameters that are now updated together have
                different kinds of state.
        """
        for group in self.inner.param_groups:
            for tensor in group["params"]:
                names = self._held[tensor]
                first = state[names[0]]
                for name in names:
                    if _kind(state[name]) != _kind(first):
                        raise CheckpointError(
                            f"optimizer state: {name!r} has {_kind(state[name])}, {names[0]!r} has "
                            f"{_kind(first)}, and they are in one group now; use the groups and "
                            "the frozen parameters of the first run"
                        )
                values = {entry: self._whole(entry, state, tensor, names, group) for entry in first}
                if values:
                    self.inner.state[tensor] = values

    def _whole(
        self,
        entry: str,
        state: dict[str, dict[str, Any]],
        tensor: torch.Tensor,
        names: list[str],
        group: dict[str, Any],
    ) -> Any:
        """One entry of the state of an optimizer tensor, put together from its parameters'."""
        example = state[names[0]][entry]
        if not isinstance(example, torch.Tensor):
            return example
        if entry in COUNTERS:
            # As torch does: counters stay on the host, unless a kernel reads them.
            on_device = entry != "step" or group.get("fused") or group.get("capturable")
            return example.to(tensor.device if on_device else "cpu", copy=True)
        if not self.flat:
            fits = example.shape == tensor.shape
            target = torch.empty_like(tensor) if fits else torch.empty_like(example)
            return target.to(dtype=example.dtype, device=tensor.device).copy_(example)
        whole = torch.zeros_like(tensor)
        for name in names:
            self._cut(whole, tensor, names, name).copy_(state[name][entry])
        return whole

    def _cut(self, value: Any, tensor: torch.Tensor, names: list[str], name: str) -> Any:
        if not isinstance(value, torch.Tensor) or value.shape != tensor.shape or not self.flat:
            return value
        sections = self.parameters.layout.sections
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


def _leaves_it_open(group: dict[str, Any]) -> bool:
    """Whether a group's options leave the choice of the kernel to us."""
    chosen = group["fused"] is not None or group["foreach"] is not None or group.get("capturable")
    return not chosen and not any(tensor.is_complex() for tensor in group["params"])


def _kind(entries: dict[str, Any]) -> dict[str, Any]:
    """Return what has to be equal for parameters that share one optimizer tensor."""
    return {
        entry: float(value) if entry in COUNTERS else type(value).__name__
        for entry, value in sorted(entries.items())
    }
