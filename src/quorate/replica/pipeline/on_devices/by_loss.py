"""Tensors of a model that a loss function uses directly: for a penalty on weights, for example.

Every stage calls the loss function, so each device needs these tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from quorate.replica.loss import Loss
from quorate.replica.nested import tensors


class UsedByLoss(TorchFunctionMode):
    """A mode that notes tensors of a model in functions of torch outside of the model's calls.

    Args:
        model: the model.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        named = (*model.named_parameters(), *model.named_buffers())
        self._names = {id(tensor): name for name, tensor in named}
        self._model, self._inside = model, 0
        self.found: set[str] = set()

    def within(self, loss: Loss) -> Callable[..., Any]:
        """Return a loss function whose calls are watched."""

        def noting(*given: Any) -> Any:
            hooks = [
                self._model.register_forward_pre_hook(self._begins),
                self._model.register_forward_hook(self._ends, always_call=True),
            ]
            try:
                with self:
                    return loss(*given)
            finally:
                self._inside = 0
                for hook in hooks:
                    hook.remove()

        return noting

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if not self._inside:
            for tensor in tensors([args, kwargs or {}]):
                if (name := self._names.get(id(tensor))) is not None:
                    self.found.add(name)
        return func(*args, **(kwargs or {}))

    def _begins(self, *_: object) -> None:
        self._inside += 1

    def _ends(self, *_: object) -> None:
        self._inside -= 1
