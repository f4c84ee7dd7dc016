"""A model's parameters: which of them train, and where they lie."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

import torch

from quorate.replica.flat import Flat
from quorate.replica.spread import Scattered
from quorate.replica.torch_internals import buffers_of

MOST_KEPT = 1 << 23


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
    places = [
        (module, dict(buffers_of(module)))
        for module in model.modules()
        if not isinstance(module, torch.jit.ScriptModule)
    ]
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
            for name, buffer in [*buffers_of(module).items()]:
                if name not in buffers:
                    delattr(module, name)
                elif buffer is not buffers[name]:  # which may be None, until forward sets it
                    setattr(module, name, buffers[name])
        with torch.no_grad():
            for tensor, value in zip(tensors, before, strict=True):
                if tensor.shape == value.shape:
                    tensor.data.copy_(value)
                else:  # an observer of quantisation gives its buffer another size where it lies
                    tensor.data = value


def sharing(model: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """Yield names of parameters that have elements in common, and so could not lie in one vector.

    A pair of equal names is a parameter whose own elements are one: an expanded one. Buffers that
    are parts of parameters are none of them, see ``aliases``; in a 4-dimensional one they are.
    """
    parameters = [*trainable(model).items()]
    for number, (name, parameter) in enumerate(parameters):
        if any(step == 0 and n > 1 for n, step in _axes(parameter)):
            yield name, name
        others: list[tuple[str, torch.Tensor]] = [*parameters[:number], *frozen(model).items()]
        if parameter.dim() == 4:  # whose format may be changed
            others += model.named_buffers()
        for other_name, other in others:
            if _overlap(parameter, other):
                yield name, other_name


def buffers_without_memory(model: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """Yield buffers that have no memory for each element: what they are, and what to do."""
    for name, buffer in model.named_buffers():
        if buffer.layout is not torch.strided:
            fix = "keep it as a plain attribute (self.x = tensor), or dense: to_dense()"
            yield f"the sparse buffer {name!r}", fix
        elif any(step == 0 and n > 1 for n, step in _axes(buffer)):
            yield (
                f"the buffer {name!r}, of which several elements are one in memory",
                "an expanded tensor needs a clone() before it is made a buffer",
            )


def aliases(model: torch.nn.Module) -> list[Callable[[], None]]:
    """Return what makes buffers again the parts of parameters that they are now.

    To be called once those lie elsewhere. Where they have other strides then, nothing is done.
    """
    found = []
    for parameter in trainable(model).values():
        for _, buffer in model.named_buffers():
            if buffer.dtype == parameter.dtype and _overlap(parameter, buffer):
                found.append(_follower(buffer, parameter))
    return found


def _follower(buffer: torch.Tensor, parameter: torch.Tensor) -> Callable[[], None]:
    shape, strides, was = buffer.shape, buffer.stride(), parameter.stride()
    offset = buffer.storage_offset() - parameter.storage_offset()

    def follow() -> None:
        if parameter.stride() == was:
            start = parameter.storage_offset() + offset
            buffer.data = parameter.detach().as_strided(shape, strides, start)

    return follow


def _axes(tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
    return zip(tensor.shape, tensor.stride(), strict=True)


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have elements in common."""
    if one.layout is not torch.strided or other.layout is not torch.strided:
        return False
    if one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
        return False
    if min(one.numel(), other.numel()) == 0 or one is other:
        return False
    spans = []
    for tensor in (one, other):
        start = tensor.storage_offset() * tensor.element_size()
        extent = 1 + sum((n - 1) * step for n, step in _axes(tensor))
        spans.append((start, start + extent * tensor.element_size()))
    (first, first_end), (second, second_end) = spans
    if first >= second_end or second >= first_end or one.dtype != other.dtype:
        return first < second_end and second < first_end
    # Their ranges overlap: columns of one matrix, say. Which elements they have:
    size = one.element_size()
    marks = torch.zeros((max(first_end, second_end)) // size, dtype=torch.bool)
    marks.as_strided(one.shape, one.stride(), first // size).fill_(True)
    return bool(marks.as_strided(other.shape, other.stride(), second // size).any())


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


def take_grads(parameters: Mapping[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    """Return the gradients by name; the parameters have none afterwards.

    Backward into an absent .grad takes over the tensor it computed, without an addition.
    """
    grads = {}
    for name, parameter in parameters.items():
        if (grad := parameter.grad) is not None:
            grads[name], parameter.grad = grad, None
    return grads
