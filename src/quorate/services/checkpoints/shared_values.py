"""Shared values in a checkpoint: compared with the script's before any value is changed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from quorate.errors import MisfitError
from quorate.machine.text import printable
from quorate.replica.beside.shared import SIMPLE, Simple, everyone, live, tensors_of
from quorate.services.checkpoints.files import tensors

FILE = "shared.safetensors"


class SavedShared(NamedTuple):
    """The saved values of the ``Shared`` objects of a script."""

    plain: Mapping[str, Mapping[str, Simple]]  # by ``Shared`` and key
    tensors: Mapping[str, torch.Tensor]  # by "name.key", or "name.key.parameter" for a module

    def load(self) -> None:
        """Set all values, as user code would."""
        for name, shared in everyone().items():
            for key, value in live(shared).items():
                if key in self.plain.get(name, {}):
                    shared[key] = self.plain[name][key]
                elif (where := f"{name}.{key}") in self.tensors:
                    shared[key] = self.tensors[where].to(value.device)
                elif isinstance(value, torch.nn.Module):
                    for found, target in tensors_of(where, value).items():
                        if found in self.tensors:
                            target.copy_(self.tensors[found])


NONE = SavedShared({}, {})


def read(path: Path, record: Mapping[str, Any]) -> tuple[SavedShared, list[str]]:
    """Read the shared values of a sound checkpoint; return the values and messages. Sets nothing.

    Raises:
        MisfitError: a saved value has another kind than the script's value, or belongs to a
            different module.
    """
    plain = record.get("shared", {})
    stored = tensors(path, record, FILE)
    saved = {name: set(values) for name, values in plain.items()}
    for where in stored:
        name, key, *_ = where.split(".")
        saved.setdefault(name, set()).add(key)
    here = everyone()
    lines = [
        f"the checkpoint has Shared {printable(name)!r}, the script does not; the values are "
        "dropped"
        for name in saved.keys() - here.keys()
    ]
    for name, shared in here.items():
        for key, value in live(shared).items():
            if key not in saved.get(name, ()):
                lines.append(
                    f"the checkpoint lacks Shared {name}.{key}; the script's value is used"
                )
            elif misfit := _misfit(f"{name}.{key}", value, key in plain.get(name, {}), stored):
                raise MisfitError(path, misfit, fix="use the script that saved the checkpoint")
    return SavedShared(plain, stored), sorted(lines)


def _misfit(where: str, value: Any, is_plain: bool, stored: Mapping[str, torch.Tensor]) -> str:
    """Return how a saved value differs in kind from the script's value, or an empty text."""
    if isinstance(value, SIMPLE) is not is_plain:
        was = "a number or a text" if is_plain else "tensors"
        return f"Shared {where}: the checkpoint has {was}, the script a {type(value).__name__}"
    if isinstance(value, torch.nn.Module):
        for found, target in tensors_of(where, value).items():
            there = stored.get(found)
            if there is None or (there.shape, there.dtype) != (target.shape, target.dtype):
                was = "nothing" if there is None else f"{tuple(there.shape)} of {there.dtype}"
                now = f"{tuple(target.shape)} of {target.dtype}"
                return f"Shared {found}: the checkpoint has {was}, the script {now}"
    return ""
