"""A model's parameters: their names, modes, and places in memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter

import torch

from quorate.replica.flat import Flat
from quorate.replica.spread import SplitFlat
from quorate.replica.torch_internals import buffers_of

# Read for each module or parameter before each shard, without a line of Python.
_TRAINING, _GRAD = attrgetter("training"), attrgetter("grad")

MOST_KEPT = 1 << 23


def trainable(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the parameters that require a gradient, by the user's names; tied ones once."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def laid_out(model: torch.nn.Module, names: Collection[str]) -> dict[str, torch.nn.Parameter]:
    """Return the parameters in flat vectors, including those switched off since."""
    return {name: p for name, p in model.named_parameters() if name in names}


def frozen(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the parameters without a gradient, by the user's names."""
    return {name: p for name, p in model.named_parameters() if not p.requires_grad}


class ModuleModes:
    """A model's training and evaluation mode, set as in a plain loop.

    ``train()`` is called if a module overrides the method, for example to keep parts of the model
    in evaluation mode. Without an override, modes are only flags. Parts of a training model put in
    evaluation mode by the script stay in evaluation mode.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._modules = [*model.modules()]
        overriding = [module for module in self._modules if _overrides(module)]
        self._calls_train = bool(overriding)
        # An overriding module with parameters may merge them for evaluation, while others read
        # them.
        self._calls_eval = all(not [*m.parameters(recurse=False)] for m in overriding)
        # A model entirely in evaluation mode was loaded for inference.
        self._kept = {m for m in self._modules if not m.training} if model.training else set()
        if self._calls_train or not model.training:
            model.train()
        self._flags = {False: [False] * len(self._modules), True: self._trained()}
        self._training = True
        self._write(training=True)

    def set(self, training: bool) -> None:
        """Put the model in a mode, whatever user code did to the modes meanwhile."""
        if training != self._training and self._calls_train and self._calls_eval:
            self._model.train(training)
            self._flags[training] = self._trained()
        self._training = training
        self._write(training=training)

    def _trained(self) -> list[bool]:
        return [module.training and module not in self._kept for module in self._modules]

    def _write(self, *, training: bool) -> None:
        flags = self._flags[training]
        if [*map(_TRAINING, self._modules)] != flags:
            for module, flag in zip(self._modules, flags, strict=True):
                module.training = flag


def settle(model: torch.nn.Module) -> None:
    """Call the model's own ``train()``, before the model is read.

    The method may freeze parameters, so it has to be called before parameters are counted.
    """
    if any(_overrides(module) for module in model.modules()):
        ModuleModes(model)


@contextmanager
def unchanged(model: torch.nn.Module) -> Iterator[None]:
    """Restore the model after the block, so that a replica may use the model itself inside.

    Restored are modes and further attributes, buffers, frozen parameters of up to ``MOST_KEPT``
    elements, and the places of all of them in memory.
    """
    attributes = [(vars(module), dict(vars(module))) for module in model.modules()]
    lies_in = [(parameter, parameter.data) for parameter in model.parameters()]
    # By place: a forward pass may replace a buffer's tensor, or add a buffer.
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
                elif buffer is not buffers[name]:  # may be None until forward sets it
                    setattr(module, name, buffers[name])
        with torch.no_grad():
            for tensor, value in zip(tensors, before, strict=True):
                if tensor.shape == value.shape:
                    tensor.data.copy_(value)
                else:  # an observer of quantisation resizes its buffer in place
                    tensor.data = value


def sharing(model: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """Yield names of parameters with common elements, which cannot lie in a single vector.

    A pair of equal names is a parameter whose own elements share memory: an expanded parameter.
    Buffers inside of parameters are not yielded, see ``aliases``, except for 4-dimensional
    parameters.
    """
    parameters = [*trainable(model).items()]
    for number, (name, parameter) in enumerate(parameters):
        if any(step == 0 and n > 1 for n, step in _axes(parameter)):
            yield name, name
        others: list[tuple[str, torch.Tensor]] = [*parameters[:number], *frozen(model).items()]
        if parameter.dim() == 4:  # its memory format may be changed
            others += model.named_buffers()
        for other_name, other in others:
            if _overlap(parameter, other):
                yield name, other_name


def buffers_without_memory(model: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """Yield buffers without memory for each element: a description, and a cure."""
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
    """Return functions that make buffers parts of parameters again, as at present.

    To be called after the parameters have moved. A function does nothing if the strides of the
    parameter have changed.
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
    """Return whether two tensors share elements."""
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
    # Their ranges overlap, as for columns of one matrix. Compare the elements:
    size = one.element_size()
    marks = torch.zeros((max(first_end, second_end)) // size, dtype=torch.bool)
    marks.as_strided(one.shape, one.stride(), first // size).fill_(True)
    return bool(marks.as_strided(other.shape, other.stride(), second // size).any())


def bind(parameters: Mapping[str, torch.nn.Parameter], flat: Flat | SplitFlat) -> None:
    """Make parameters views of the flat vectors."""
    for name, parameter in parameters.items():
        parameter.data = flat.views[name]


def _overrides(module: torch.nn.Module) -> bool:
    """Return whether a module overrides torch's ``train()`` or ``eval()``."""
    names = ("train", "eval")
    return any(
        getattr(type(module), name) is not getattr(torch.nn.Module, name) or name in vars(module)
        for name in names
    )


def forget_grads(parameters: Collection[torch.nn.Parameter]) -> None:
    """Remove the gradients of parameters, usually none."""
    if [*map(_GRAD, parameters)].count(None) < len(parameters):
        for parameter in parameters:
            parameter.grad = None


def take_grads(parameters: Mapping[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    """Return the gradients by name, and remove them from the parameters.

    A backward pass into an absent .grad stores its tensor without an addition.
    """
    grads = {}
    for name, parameter in parameters.items():
        if (grad := parameter.grad) is not None:
            grads[name], parameter.grad = grad, None
    return grads
