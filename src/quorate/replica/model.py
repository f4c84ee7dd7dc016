"""A model's parameters: which of them train, and where they lie."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch

from quorate.replica.flat import Flat
from quorate.replica.spread import Scattered

MOST_KEPT = 1 << 20


def trainable(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the parameters that want a gradient, by the user's names; tied ones once."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def laid_out(model: torch.nn.Module, names: Collection[str]) -> dict[str, torch.nn.Parameter]:
    """Return the parameters that lie in flat vectors, also those switched off since."""
    return {name: p for name, p in model.named_parameters() if name in names}


def frozen(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the parameters that want no gradient, by the user's names."""
    return {name: p for name, p in model.named_parameters() if not p.requires_grad}


class Modes:
    """A model's training and evaluation mode, as a plain loop sets them.

    ``train()`` is called if a module has one of its own, which may keep parts of the model in
    evaluation mode, say. Without one, flags are all there is to it. Parts of a training model that
    the script put in evaluation mode stay so.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._modules = [*model.modules()]
        overriding = [module for module in self._modules if _overrides(module)]
        self._calls_train = bool(overriding)
        # One that has parameters of its own may merge them for evaluation, and others read them.
        self._calls_eval = all(not [*m.parameters(recurse=False)] for m in overriding)
        # A model that is in evaluation mode as a whole was loaded for inference.
        self._kept = {m for m in self._modules if not m.training} if model.training else set()
        if self._calls_train or not model.training:
            model.train()
        self._flags = {False: [False] * len(self._modules), True: self._trained()}
        self._training = True
        self._write(training=True)

    def set(self, training: bool) -> None:
        """Put the model in a mode, whatever user code did to it meanwhile."""
        if training != self._training and self._calls_train and self._calls_eval:
            self._model.train(training)
            self._flags[training] = self._trained()
        self._training = training
        self._write(training=training)

    def _trained(self) -> list[bool]:
        return [module.training and module not in self._kept for module in self._modules]

    def _write(self, *, training: bool) -> None:
        for module, flag in zip(self._modules, self._flags[training], strict=True):
            if module.training is not flag:
                module.training = flag


def settle(model: torch.nn.Module) -> None:
    """Call a ``train()`` of the model's own, before anything is taken from the model.

    It may freeze parameters, so that it has to be called before they are counted.
    """
    if any(_overrides(module) for module in model.modules()):
        Modes(model)


@contextmanager
def unchanged(model: torch.nn.Module) -> Iterator[None]:
    """Let a replica be made of the model itself; after the block the model is as it was.

    That is its modes and other attributes, its buffers, its frozen parameters of up to
    ``MOST_KEPT`` elements, and where all of them lie.
    """
    attributes = [(vars(module), dict(vars(module))) for module in model.modules()]
    lies_in = [(parameter, parameter.data) for parameter in model.parameters()]
    # By their places: a forward pass may put another tensor there, or a buffer where none was.
    places = [(module, dict(module.named_buffers(recurse=False))) for module in model.modules()]
    tensors = [*model.buffers(), *(p for p in frozen(model).values() if p.numel() <= MOST_KEPT)]
    before = [tensor.detach().clone() for tensor in tensors]
    try:
        yield
    finally:
        for own, kept in attributes:
            own.clear()
            own.update(kept)
        for parameter, data in lies_in:
            parameter.data = data
        for module, buffers in places:
            for name, buffer in [*module.named_buffers(recurse=False)]:
                if name not in buffers:
                    delattr(module, name)
                elif buffer is not buffers[name]:
                    setattr(module, name, buffers[name])
        with torch.no_grad():
            for tensor, value in zip(tensors, before, strict=True):
                tensor.data.copy_(value)


def bind(parameters: Mapping[str, torch.nn.Parameter], flat: Flat | Scattered) -> None:
    """Make parameters views of the flat vectors."""
    for name, parameter in parameters.items():
        parameter.data = flat.views[name]


def _overrides(module: torch.nn.Module) -> bool:
    """Return whether a module's ``train()`` or ``eval()`` is not torch's."""
    names = ("train", "eval")
    return any(
        getattr(type(module), name) is not getattr(torch.nn.Module, name) or name in vars(module)
        for name in names
    )
