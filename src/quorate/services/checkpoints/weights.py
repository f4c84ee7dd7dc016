"""Weights to begin from: those that plain torch, another run or a checkpoint of ours saved."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from quorate.errors import CheckpointError
from quorate.services.checkpoints import files as checkpoint

# What DataParallel, DDP and torch.compile put before every name.
PREFIXES = ("module.", "_orig_mod.")

LOG = logging.getLogger("quorate").warning

# Under which many scripts save the state dict among other things.
NESTED = ("state_dict", "model_state_dict", "model")


Model = TypeVar("Model", bound=torch.nn.Module)


def load_weights(model: Model, path: Path | str, say: Callable[[str], None] = LOG) -> Model:
    """Give a model the weights of a file, a checkpoint's directory, or a run directory.

    Args:
        model: any module; it is changed, and returned.
        path: .safetensors, or what ``torch.save`` made of a state dict (read with weights_only).
        say: shows a line to the user: that prefixes were taken off.

    Raises:
        CheckpointError: it cannot be read, or is of another model: each key that does not fit is
            named, with both shapes.
    """
    path = Path(path)
    found = _read(path)
    for prefix in _prefixes_of(found):
        say(f"{path}: the prefix {prefix!r} was taken off every name")
        found = {name.removeprefix(prefix): value for name, value in found.items()}
    own = {n: v for n, v in model.state_dict().items() if isinstance(v, torch.Tensor)}
    wrong = [
        f"{name}: the file has {_shape(found.get(name))}, the model {_shape(own.get(name))}"
        for name in sorted(own.keys() | found.keys())
        if _shape(own.get(name)) != _shape(found.get(name))
    ]
    if wrong:
        more = f", and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise CheckpointError(
            f"weights of {path}: {'; '.join(wrong[:5])}{more}; give weights of this model"
        )
    with torch.no_grad():
        for name, value in own.items():
            value.copy_(found[name])
    return model


def _read(path: Path) -> dict[str, torch.Tensor]:
    if path.is_dir():
        path = _file_in(path)
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, SafetensorError, UnpicklingError, EOFError) as error:
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"weights of {path}: got {said}; expected a .safetensors file, or a state dict of "
            "tensors by torch.save"
        ) from error
    return _state_dict(found, path)


def _file_in(folder: Path) -> Path:
    """The weights in a checkpoint's directory, or in that of a run."""
    if (folder / checkpoint.MARKER).exists():
        return folder / "model.safetensors"
    found = checkpoint.find(folder)
    if found is None:
        raise CheckpointError(f"init_from {folder}: there is no checkpoint in it; give a file")
    return found.path / "model.safetensors"


def _state_dict(found: Any, path: Path) -> dict[str, torch.Tensor]:
    for name in NESTED:
        if isinstance(found, Mapping) and isinstance(found.get(name), Mapping):
            found = found[name]
            break
    if not isinstance(found, Mapping) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in found.items()
    ):
        kind = type(found).__name__
        raise CheckpointError(
            f"weights of {path}: got a {kind}, expected a state dict: tensors by name; save "
            "model.state_dict()"
        )
    return dict(found)


def _prefixes_of(names: Mapping[str, Any]) -> list[str]:
    """The known prefixes that all names have, from the outside in."""
    left, found = list(names), []
    while prefix := next((p for p in PREFIXES if left and all(n.startswith(p) for n in left)), ""):
        found.append(prefix)
        left = [name.removeprefix(prefix) for name in left]
    return found


def _shape(tensor: torch.Tensor | None) -> object:
    return "no such tensor" if tensor is None else tuple(tensor.shape)
