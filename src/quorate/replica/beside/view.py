"""A view of shared values: the values for a replica, on the replica's device."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from quorate.errors import SharedError
from quorate.replica.beside.shared import are_any, everyone, live, read_by
from quorate.replica.beside.values import SharedValues, as_set
from quorate.replica.torch_internals import version

_NOTHING = nullcontext()


class ValuesView:
    """The shared values for the shards of a replica. Used by one thread at a time.

    Args:
        device: the device of tensors and modules.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._values: SharedValues | None = None  # None: as set in this process, for a trial
        self._plain, self._tensors = as_set()
        # Tensors passed to user code, by name, with their number of writes at that time.
        self._handed: dict[str, tuple[torch.Tensor, int]] = {}
        self._modules: dict[str, torch.nn.Module] = {}
        self._stale: set[str] = set()  # modules with outdated values

    @property
    def values(self) -> SharedValues | None:
        """The values for the next shards; None: those set in this process."""
        return self._values

    def take(self, values: SharedValues) -> None:
        """Let the next shards read these values."""
        if values is self._values:
            return
        if self._values is None or values.stored != self._values.stored:
            self._forget_tensors()
        self._values, self._plain, self._tensors = values, values.plain, values.tensors.views

    def reading(self) -> AbstractContextManager[None]:
        """Return a context in which this thread's code reads this view.

        Raises:
            SharedError: user code has written a tensor; raised at the end of the block.
        """
        return self._reading() if are_any() else _NOTHING

    @contextmanager
    def _reading(self) -> Iterator[None]:
        if self._values is None:
            self._forget_tensors()
            self._plain, self._tensors = as_set()
        with read_by(self):
            yield
        for name, (tensor, written) in self._handed.items():
            if version(tensor) != written:
                raise SharedError(
                    f"Shared {name}",
                    "the tensor is written while a shard is computed, and no other worker would "
                    "see the new values",
                    fix="write between updates; a module that keeps statistics needs eval(): "
                    "teacher.eval()",
                )

    def value(self, name: str, key: str) -> Any:
        """Return a value, on the device.

        Raises:
            SharedError: the coordinator has no such value.
        """
        plain = self._plain.get(name)
        if plain is None:
            raise SharedError(
                f"Shared {name!r}",
                "the coordinator has no Shared of this name",
                fix="make the Shared before training, in every run of the script",
            )
        if key in plain:
            return plain[key]
        where = f"{name}.{key}"
        if where in self._tensors:
            return self._tensor(where)
        return self._module(where, live(everyone()[name])[key])

    def _tensor(self, where: str) -> torch.Tensor:
        if where not in self._handed:
            # By .data, with a count of its own: all views of a vector share their count of writes.
            tensor = self._tensors[where].data.to(self._device)
            self._handed[where] = tensor, version(tensor)
        return self._handed[where][0]

    def _module(self, where: str, original: torch.nn.Module) -> torch.nn.Module:
        module = self._modules.get(where)
        if module is None:
            self._modules[where] = module = self._copied(where, original)
            self._stale.add(where)
        if where in self._stale:
            self._stale.discard(where)
            self._bind(where, module)
        return module

    def _copied(self, where: str, original: torch.nn.Module) -> torch.nn.Module:
        """Return a copy of a module, with the shared values and without gradients.

        Raises:
            SharedError: the module cannot be copied.
        """
        memo: dict[int, Any] = {}
        for parameter in original.parameters():
            memo[id(parameter)] = torch.nn.Parameter(parameter.data, requires_grad=False)
        memo |= {id(buffer): buffer.data for buffer in original.buffers()}
        try:
            # On the device from the start: torch lets ``.data`` move between few kinds of devices.
            return copy.deepcopy(original, memo).to(self._device)
        except Exception as error:
            raise SharedError(
                f"Shared {where}",
                f"the module cannot be copied: {error}",
                fix="share its tensors",
            ) from error

    def _bind(self, where: str, module: torch.nn.Module) -> None:
        for path, each in module.named_modules():
            prefix = f"{where}.{path}" if path else where
            for name, parameter in each.named_parameters(recurse=False):
                if (found := f"{prefix}.{name}") in self._tensors:  # a tied one has another name
                    parameter.data = self._tensors[found].data.to(self._device)
                    self._handed[found] = parameter, version(parameter)
            for name, _ in each.named_buffers(recurse=False):
                if (found := f"{prefix}.{name}") in self._tensors:
                    buffer = self._tensors[found].data.to(self._device)
                    setattr(each, name, buffer)
                    self._handed[found] = buffer, version(buffer)

    def _forget_tensors(self) -> None:
        self._handed = {}
        self._stale = set(self._modules)
