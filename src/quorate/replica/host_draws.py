"""Random numbers of a device, drawn on the host: ``Compute(random="host")``.

The numbers drawn by a GPU depend on the number of threads of the GPU (pytorch#194676). With these
functions, a random operator of a device computes on the CPU, draws from the stream of the calling
thread, as in a shard on a CPU, and the numbers are copied. So all devices have the CPU's numbers.

``Stream`` calls these functions, from torch's dispatcher: operators without draws take no
additional time. Fused operators with draws inside their kernels have no numbers to copy: only
dropout is replaced by its parts, and all others are refused.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from quorate.errors import SettingError, UserError
from quorate.machine.devices import has_streams
from quorate.replica.compute import DEVICE, HOST
from quorate.replica.on_host import CPU, on_host
from quorate.replica.placement.schema import arguments
from quorate.replica.shared.code import user_line
from quorate.replica.torch_internals import Promise, holds, schema_arguments

if TYPE_CHECKING:
    from quorate.replica.computing import Computing

# Operators with kernels on devices only, which draw if their dropout is not zero. A test compares
# the list with the operators of the installed torch.
_ATTENTION = "use torch.nn.attention.sdpa_kernel(SDPBackend.MATH) around the attention"
_RECURRENT = "put nn.Dropout between recurrent layers of one layer each"
FUSED: dict[str, str] = {
    **dict.fromkeys(
        (
            "_cudnn_attention_forward",
            "_efficient_attention_forward",
            "_flash_attention_forward",
            "_flash_attention_forward.quantized",
            "_scaled_dot_product_attention_math_for_mps",
            "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_flash_attention.quantized",
            "_scaled_dot_product_fused_attention_overrideable",
            "_triton_scaled_dot_attention",
        ),
        _ATTENTION,
    ),
    **dict.fromkeys(
        ("_cudnn_init_dropout_state", "_cudnn_rnn", "_lstm_mps", "miopen_rnn"), _RECURRENT
    ),
    "_fused_dropout": "use torch.nn.functional.dropout",
}
_PROBABILITIES = ("dropout_p", "dropout", "p")  # names of the probability in the operators' schemas


def draw(
    operator: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    device: torch.device,
    generator: torch.Generator,
) -> Any:
    """Return the result of a device's random operator, drawn on the host.

    Args:
        operator: an operator with a generator argument.
        generator: a generator of the CPU.

    Raises:
        UserError: the draw is being recorded for a graph, and would be repeated with the same
            numbers.
    """
    is_recorded = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    if is_recorded is not None and is_recorded():
        raise UserError(
            f"{operator.name()} draws on the host, and a graph of {device.type} would repeat the "
            "same numbers",
            fix="leave out the graph, or random='host'",
        )
    # Values used for their shapes only, or written and not read, need no copy; the host would wait
    # for a copy.
    name, is_late = operator.name(), has_streams(device)
    is_shape = "_like" in name
    blank = {
        id(value)
        for value, written, _ in arguments(operator, args, kwargs)
        if is_shape or (written and "rrelu" not in name)
    }

    def fetch(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in blank:
            return tensor.to(CPU)
        # With the same strides: kernels of the CPU draw in the order of memory.
        pin = is_late and not is_shape
        size, stride = tensor.shape, tensor.stride()
        return tensor.new_empty_strided(size, stride, device=CPU, pin_memory=pin)

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_late and any(each.name == "pin_memory" for each in schema_arguments(operator)):
            kwargs["pin_memory"] = True
        return operator(*args, **kwargs, generator=generator)

    return on_host(operator, args, kwargs, device, run=run, fetch=fetch, non_blocking=is_late)


def dropout(
    input: torch.Tensor, p: float, _train: bool | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result of ``native_dropout``, by the operators of dropout on a CPU."""
    noise = torch.empty_like(input)
    noise.bernoulli_(1 - p)
    kept = noise.to(torch.bool)
    return input * (noise if p == 1 else noise.div_(1 - p)), kept


def draws(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call of an operator of ``FUSED``, or of ``native_dropout``, draws."""
    given = {
        argument.name: kwargs.get(argument.name, argument.default_value)
        for argument in schema_arguments(operator)
    }
    given.update(zip(given, args, strict=False))
    if given.get("train") is False:
        return False
    return any(given.get(name) not in (None, 0) for name in _PROBABILITIES)


def refuse(operator: Any, fix: str) -> NoReturn:
    """Refuse an operator of ``FUSED``.

    Raises:
        UserError: always.
    """
    where = f" ({line})" if (line := user_line(sys._getframe(1))) else ""
    raise UserError(
        f"{operator.name()}{where}",
        "this operator draws random numbers within its kernel, and random='host' cannot replace "
        "them",
        fix=f"{fix}, or pass random='device' (--random device), whose numbers depend on the model "
        "of the GPU",
    )


def check(computing: Computing) -> None:
    """Refuse settings that cannot be combined.

    Raises:
        SettingError: compiled operators cannot be replaced, or this torch cannot replace any.
    """
    if computing.random != HOST:
        return
    if not holds(Promise.STREAMS):
        fix = f"torch {torch.__version__} lacks what it is made of; install another"
        raise SettingError("random", HOST, DEVICE, fix)
    if computing.compile:
        raise SettingError("random", HOST, "compile=False with it", "leave off one of the two")
