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
from quorate.services.checkpoints import files

Model = TypeVar("Model", bound=torch.nn.Module)

# What DataParallel, DDP and torch.compile put before every name.
PREFIXES = ("module.", "_orig_mod.")

# Under which many scripts save the state dict among other things.
NESTED = ("state_dict", "model_state_dict", "model")

LOG = logging.getLogger("quorate").warning


def load_weights(model: Model, path: str | Path, say: Callable[[str], None] = LOG) -> Model:
    """Give a model the weights of a file, a checkpoint's directory, or a run directory.

    Args:
        model: any module; it is changed, and returned.
        path: .safetensors, or what ``torch.save`` made of a state dict (read with weights_only).
        say: shows a line to the user: that prefixes were taken off.

    Returns:
        The model.

    Raises:
        CheckpointError: it cannot be read, or is of another model: each key that does not fit is
            named, with both shapes.
    """
    weights = _read(Path(path))
    for prefix in _prefixes_of(weights):
        say(f"{path}: the prefix {prefix!r} was taken off every name")
        weights = {name.removeprefix(prefix): value for name, value in weights.items()}
    own = {n: v for n, v in model.state_dict().items() if isinstance(v, torch.Tensor)}
    wrong = [
        f"{name}: the file has {_shape(weights.get(name))}, the model {_shape(own.get(name))}"
        for name in sorted(own.keys() | weights.keys())
        if _shape(own.get(name)) != _shape(weights.get(name))
    ]
    if wrong:
        more = f", and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise CheckpointError(
            f"weights of {path}: {'; '.join(wrong[:5])}{more}; give weights of this model"
        )
    with torch.no_grad():
        for name, value in own.items():
            value.copy_(weights[name])
    return model


def _read(path: Path) -> dict[str, torch.Tensor]:
    if path.is_dir():
        path = _file_in(path)
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, SafetensorError, UnpicklingError, EOFError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"weights of {path}: got {reason}; expected a .safetensors file, or a state dict of "
            "tensors by torch.save"
        ) from error
    return _state_dict(content, path)


def _file_in(folder: Path) -> Path:
    """Return the weights' file in a checkpoint's directory, or in that of a run."""
    if (folder / files.MARKER).exists():
        return folder / "model.safetensors"
    sound = files.find(folder)
    if sound is None:
        raise CheckpointError(f"weights of {folder}: there is no checkpoint in it; give a file")
    return sound.path / "model.safetensors"


def _state_dict(content: Any, path: Path) -> dict[str, torch.Tensor]:
    for name in NESTED:
        if isinstance(content, Mapping) and isinstance(content.get(name), Mapping):
            content = content[name]
            break
    if not isinstance(content, Mapping) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in content.items()
    ):
        kind = type(content).__name__
        raise CheckpointError(
            f"weights of {path}: got a {kind}, expected a state dict: tensors by name; save "
            "model.state_dict()"
        )
    return dict(content)


def _prefixes_of(names: Mapping[str, Any]) -> list[str]:
    """List the known prefixes that all names have, from the outside in."""
    left, prefixes = list(names), []
    while prefix := next((p for p in PREFIXES if left and all(n.startswith(p) for n in left)), ""):
        prefixes.append(prefix)
        left = [name.removeprefix(prefix) for name in left]
    return prefixes


def _shape(tensor: torch.Tensor | None) -> object:
    return "no such tensor" if tensor is None else tuple(tensor.shape)
