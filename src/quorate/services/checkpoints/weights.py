"""Initial weights: from plain torch, another run or a checkpoint of quorate."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader, BytesIO
from pathlib import Path
from pickle import UnpicklingError
from pickletools import genops
from typing import IO, Any, TypeVar
from zipfile import ZIP_STORED, ZipFile, is_zipfile

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from quorate.errors import CheckpointError
from quorate.machine.regular_file import exists, is_folder, open_regular, size_of
from quorate.machine.resources import too_large
from quorate.machine.text import printable
from quorate.services.checkpoints import files, tensor_file

Model = TypeVar("Model", bound=torch.nn.Module)

# The prefixes of DataParallel and DDP, and of torch.compile, before every name.
PREFIXES = ("module.", "_orig_mod.")

# Keys under which many scripts save the state dict beside other values.
NESTED = ("state_dict", "model_state_dict", "model")

LOG = logging.getLogger("quorate").warning


def load_weights(model: Model, path: str | Path, say: Callable[[str], None] = LOG) -> Model:
    """Load weights from a file, a checkpoint or a run directory into a model.

    From a run directory the newest sound checkpoint is loaded. Every byte of a checkpoint is
    compared with its checksum.

    Args:
        model: any ``torch.nn.Module``; changed in place.
        path: a .safetensors file, a file with a state dict saved by ``torch.save`` (read with
            ``weights_only=True``), a checkpoint's directory or a run directory.
        say: receives messages for the user: prefixes removed from names, values converted to
            another dtype, checkpoints skipped. Default: log the messages.

    Returns:
        The model.

    Raises:
        CheckpointError: the file cannot be read, or belongs to another model; the message names
            each key that does not match, with both shapes. The model is unchanged.
    """
    path = Path(path)
    own = {n: v for n, v in model.state_dict().items() if isinstance(v, torch.Tensor)}
    own_prefix = "".join(_prefixes_of(own))  # a compiled model accepts plain weights
    own = {name.removeprefix(own_prefix): value for name, value in own.items()}
    file = _file_in(path, say) if is_folder(path) else path
    # 1. Compare names and shapes: from the header alone, if the file has a header.
    weights = _safetensors(file) if file.suffix == ".safetensors" else _pickled(file)
    names = {name: name for name in weights}
    for prefix in _prefixes_of(weights):
        if prefix not in own_prefix:
            say(f"{path}: removed the prefix {prefix!r} from every name")
        names = {name.removeprefix(prefix): there for name, there in names.items()}
    weights = {name: weights[there] for name, there in names.items()}
    wrong = [
        f"{printable(name)}: the file has {_shape(weights.get(name))}, "
        f"the model {_shape(own.get(name))}"
        for name in sorted(own.keys() | weights.keys())
        if _shape(own.get(name)) != _shape(weights.get(name))
    ]
    if wrong:
        more = f", and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise CheckpointError(
            f"weights of {path}",
            f"{'; '.join(wrong[:5])}{more}",
            fix="give weights of this model",
        )
    # 2. Copy the values.
    if file.suffix == ".safetensors":
        with _readable(file):
            read = load_file(file)
        weights = {name: read[there] for name, there in names.items()}
    for line in _conversions(weights, own):
        say(f"{path}: {line}")
    with torch.no_grad():
        for name, value in own.items():
            value.copy_(weights[name])
    return model


def _file_in(folder: Path, say: Callable[[str], None]) -> Path:
    """Return the path of the weights in a verified checkpoint of a directory.

    The directory is a checkpoint's own or a run directory, whose newest sound checkpoint is used.
    """
    file = "model.safetensors"
    if exists(folder / files.MARKER) or exists(folder / files.RECORD):
        files.check_named(folder)
        return folder / file
    sound = files.find(folder)
    if sound is None:
        raise CheckpointError(
            f"weights of {folder}",
            "there is no checkpoint in it",
            fix="give a file",
        )
    for wrong in sound.passed_over:
        say(f"skipped a checkpoint: {wrong}")
    return sound.path / file


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn any exception of a reader into an error of one line.

    Raises:
        CheckpointError: the reader raised an exception. Readers of damaged files raise KeyError,
            IndexError, AssertionError, UnicodeDecodeError, ...; no list of the types is complete.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        reason = printable(getattr(error, "strerror", None) or error or type(error).__name__)
        if not isinstance(error, (OSError, RuntimeError, SafetensorError, UnpicklingError)):
            reason = f"{type(error).__name__}: {reason}"
        raise CheckpointError(
            f"weights of {path}",
            got=reason,
            expected="a .safetensors file, or a state dict of tensors by torch.save",
        ) from error


def _safetensors(path: Path) -> dict[str, torch.Tensor]:
    """Return tensors on "meta" with the names, shapes and dtypes of a file."""
    with _readable(path):
        return {
            name: torch.empty(stored.shape, dtype=getattr(torch, stored.dtype), device="meta")
            for name, stored in tensor_file.header(path).tensors.items()
        }


def _pickled(path: Path) -> dict[str, torch.Tensor]:
    with _readable(path):
        with open_regular(path) as file:
            _require_bounded(path, file)
            file.seek(0)
            content = torch.load(file, map_location="cpu", weights_only=True)
        return _state_dict(content, path)


def _require_bounded(path: Path, file: BufferedReader) -> None:
    """Refuse a file whose reading would take more memory than its size, or than is available.

    Raises:
        CheckpointError: reading the file would take too much memory.
    """
    size = size_of(file)
    if reason := too_large(size):
        raise CheckpointError(f"weights of {path}", f"reading it takes {reason}")
    if not is_zipfile(file):  # the format of torch.save before 1.6: pickles, then the elements
        file.seek(0)
        pickles: list[IO[bytes]] = [file] * 5
    else:
        with ZipFile(file) as archive:
            parts = archive.infolist()
            # torch.save writes uncompressed parts. A compressed part of zeros is a thousandth of
            # its content, and a part under many names is read once per name.
            if any(part.compress_type != ZIP_STORED for part in parts) or size < sum(
                part.file_size for part in parts
            ):
                raise CheckpointError(
                    f"weights of {path}",
                    got="compressed parts",
                    expected="what torch.save writes",
                )
            pickles = [
                BytesIO(archive.read(part)) for part in parts if part.filename.endswith(".pkl")
            ]
    for pickle in pickles:
        for operation, argument, _ in genops(pickle):
            # bytearray(n) allocates n bytes, and weights_only lets the call through.
            if operation.name == "GLOBAL" and str(argument).endswith(" bytearray"):
                raise CheckpointError(
                    f"weights of {path}",
                    got="a bytearray",
                    expected="tensors by name",
                )


def _conversions(
    weights: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]
) -> Iterator[str]:
    """Yield a message per dtype conversion; raise for a tensor that cannot be copied."""
    others: dict[tuple[torch.dtype, torch.dtype], list[str]] = {}
    for name in own:
        value = weights[name]
        if value.layout is not torch.strided or value.is_quantized or value.is_meta:
            raise CheckpointError(
                f"weights: {name}",
                "not a dense tensor with values",
                fix="save the parameter as such a tensor",
            )
        if value.dtype != own[name].dtype:
            if not torch.can_cast(value.dtype, own[name].dtype):
                raise CheckpointError(
                    f"weights: {name}",
                    got=f"{value.dtype}",
                    expected=f"{own[name].dtype} as in the model, or a dtype that can be "
                    "converted to it",
                )
            others.setdefault((value.dtype, own[name].dtype), []).append(name)
    for (was, now), names in others.items():
        yield f"converted {len(names)} tensors (first: {names[0]}) from {was} to {now}"


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
            f"weights of {path}",
            got=f"a {kind}",
            expected="a state dict: tensors by name",
            fix="save model.state_dict()",
        )
    return dict(content)


def _prefixes_of(names: Mapping[str, Any]) -> list[str]:
    """List the known prefixes shared by all names, outermost first."""
    left, prefixes = list(names), []
    while prefix := next((p for p in PREFIXES if left and all(n.startswith(p) for n in left)), ""):
        prefixes.append(prefix)
        left = [name.removeprefix(prefix) for name in left]
    return prefixes


def _shape(tensor: torch.Tensor | None) -> object:
    return "no such tensor" if tensor is None else tuple(tensor.shape)
