"""Precision: the numbers in which replicas compute. Masters, sums and updates stay in float32.

``fp32``  float32, with TensorFloat-32 off: cuDNN's is on in torch by default.
``tf32``  float32 whose products and convolutions an NVIDIA GPU makes with 10 bits of mantissa.
``bf32``  float32 whose products and convolutions a CPU with AMX makes of bfloat16.
``bf16``  working parameters in bfloat16; autocast picks the dtype of each operation.
``fp16``  the same in float16, whose gradients are scaled: for GPUs.

Under ``bf16`` and ``fp16`` a replica computes with a copy of the float32 parameters (the masters),
rounded once per update, instead of casting each weight in each pass as autocast does by itself.
Normalisation layers keep float32 parameters, and losses are computed in float32, by autocast's own
lists. Gradients become float32 when they leave the replica: shards are summed in float32.

float16 ends at 65,504 and loses values below 6e-8, so the loss is scaled before the backward pass
(Micikevicius et al., Mixed Precision Training, 2018). The usual dynamic scale depends on all steps
so far, and skips a step whose gradient overflows. A replica computes each shard independently: it
begins with ``FIRST_SCALE``, and repeats the shard with a smaller scale if its gradient overflows.
So the scale is a function of the shard and the parameters, any device finds the same bits, and no
step is lost.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from quorate.errors import SettingError, cure
from quorate.machine.shared_setting import SharedSetting
from quorate.replica.quick import torch_calls
from quorate.replica.torch_internals import NORM_BASES, cpu_has_bfloat16

# These layers sum many values, or keep averages: rounding would hurt there, and costs nothing to
# avoid. RMSNorm is not among them: torch's kernel wants its weight in the dtype of the input.
NORMS = (*NORM_BASES, torch.nn.GroupNorm, torch.nn.LayerNorm)

# Powers of two: scaling by them rounds nothing. Enough for means over a batch; see the module.
FIRST_SCALE = 2.0**13
SCALE_STEP = 2.0**4
LEAST_SCALE = 2.0**-7


_AS_THEY_ARE = nullcontext()


@dataclass(frozen=True)
class Precision:
    """One of the five precisions."""

    name: str
    working: torch.dtype | None = None  # of the parameters that replicas compute with
    tf32: bool = False
    is_bf32: bool = False

    @property
    def is_scaled(self) -> bool:
        """True if gradients need a scale."""
        return self.working is torch.float16

    def working_tensors(
        self, model: torch.nn.Module, trained: Mapping[str, torch.Tensor]
    ) -> list[tuple[str, torch.Tensor]] | None:
        """Return templates of a replica's trained parameters; None: the parameters themselves."""
        if self.working is None:
            return None
        kept = {
            id(parameter)
            for module in model.modules()
            if isinstance(module, NORMS)
            for parameter in module.parameters(recurse=False)
        }
        found = []
        for name, parameter in trained.items():
            lowered = parameter.dtype == torch.float32 and id(parameter) not in kept
            dtype = self.working if lowered else parameter.dtype
            found.append((name, torch.empty_like(parameter, dtype=dtype, requires_grad=False)))
        return found

    def operations(self, devices: Sequence[torch.device]) -> AbstractContextManager[object]:
        """Return a context for a forward pass: this thread's operations pick their dtype."""
        return _AS_THEY_ARE if self.working is None else self._casts(devices)

    @contextmanager
    def _casts(self, devices: Sequence[torch.device]) -> Iterator[None]:
        with ExitStack() as stack:
            for kind in dict.fromkeys(device.type for device in devices):
                # The cache belongs to the process, with a content that would depend on all towers;
                # and weights in the working dtype need no cache.
                cast = torch.autocast(kind, dtype=self.working, cache_enabled=False)
                stack.enter_context(cast)
            yield


FP32 = Precision("fp32")
ALL = (
    FP32,
    Precision("tf32", tf32=True),
    Precision("bf32", is_bf32=True),
    Precision("bf16", torch.bfloat16),
    Precision("fp16", torch.float16),
)


def derive(loss: torch.Tensor, scale: float) -> None:
    """Compute the gradients of ``scale * loss``, a real scalar, into the parameters."""
    if scale == 1.0:
        torch_calls.derive(loss)
    else:
        torch.autograd.backward(loss, loss.new_tensor(scale))


def overflows(loss: float, grads: Iterable[torch.Tensor]) -> bool:
    """Return whether a smaller scale may help: the gradient is not finite, but the loss is."""
    if not math.isfinite(loss):
        return False
    checks = [torch.isfinite(grad).all() for grad in grads]
    # A single transfer, and so a single wait for the device.
    return bool(checks) and not torch.stack([c.to(checks[0].device) for c in checks]).all()


def parse(name: object, devices: Sequence[torch.device] = ()) -> Precision:
    """Return a precision by name.

    Args:
        devices: devices that compute in the precision.

    Raises:
        SettingError: the name is unknown, or a device does not support the precision.
    """
    found = [precision for precision in ALL if precision.name == name]
    if not found:
        names = [precision.name for precision in ALL]
        expected = f"one of {', '.join(names)}"
        raise SettingError("precision", name, expected, cure(name, names))
    for kind in sorted({device.type for device in devices if found[0].working is not None}):
        try:
            torch.autocast(kind, dtype=found[0].working)
        except (RuntimeError, AssertionError):
            fix = f"torch's autocast does not know {kind}"
            raise SettingError("precision", name, f"fp32 on {kind}", fix) from None
    if found[0].is_bf32:
        _require_bf32({device.type for device in devices})
    return found[0]


def _require_bf32(kinds: set[str]) -> None:
    if others := sorted(kinds - {"cpu"}):
        fix = "on an NVIDIA GPU it is tf32 that is like it"
        raise SettingError("precision", "bf32", f"fp32 on {others[0]}", fix)
    if kinds and not rounds_factors():
        expected = "a CPU on which oneDNN rounds factors of float32 to bfloat16: one with AMX"
        fix = "this one computes them in float32 all the same; use fp32, or bf16"
        raise SettingError("precision", "bf32", expected, fix)


@cache
def rounds_factors() -> bool:
    """Return whether ``bf32`` has an effect on this processor, found by a product.

    torch has the switch on any processor with bfloat16, but oneDNN may ignore the switch: on
    AVX512-BF16 without AMX it computes in float32.
    """
    onednn: Any = torch.backends.mkldnn
    if not onednn.is_available():
        return False
    factors = torch.full((64, 64), 1 + 2.0**-10)  # rounds to 1 in bfloat16
    before = onednn.matmul.fp32_precision
    try:
        onednn.matmul.fp32_precision = "bf16"
        return (factors @ factors)[0, 0].item() == 64
    except RuntimeError:  # a build without the switch
        return False
    finally:
        onednn.matmul.fp32_precision = before


def remarks(precision: Precision, devices: Sequence[torch.device]) -> list[str]:
    """Return lines about devices that do not suit a precision."""
    kinds = {device.type for device in devices}
    # TF32 is NVIDIA's.
    if precision.tf32 and kinds != {"cuda"}:
        other = ", ".join(sorted(kinds - {"cuda"}))
        return [f"precision='tf32' has no effect on {other}: only NVIDIA GPUs have it"]
    if precision.working is torch.bfloat16 and "cpu" in kinds and not cpu_has_bfloat16():
        return ["precision='bf16': this CPU has no instructions for it, so fp32 may be faster"]
    if precision.is_scaled and "cpu" in kinds:
        return ["precision='fp16' on a CPU is slow, and some layers have no kernel; try 'bf16'"]
    return []


@contextmanager
def float32_products(precision: Precision) -> Iterator[list[str]]:
    """Set the rounding of float32 factors in this process inside the block, as the precision says.

    Factors are rounded to TensorFloat-32 on GPUs, to bfloat16 on CPUs, or not at all.

    Yields lines for the user: roundings switched off now.
    """
    on_gpu = "tf32" if precision.tf32 else "ieee"
    on_cpu = "bf16" if precision.is_bf32 else "ieee"
    with FLOAT32.at([on_gpu] * 3 + [on_cpu] * 3) as before:
        yield _switched_off(before, precision)


def _switched_off(before: Sequence[str], precision: Precision) -> list[str]:
    """Return lines for the user on roundings that the script has switched on."""
    said = []
    if before[0] == "tf32" and torch.cuda.is_available() and not precision.tf32:
        said.append(f"TF32 is off, because precision={precision.name!r}; pass 'tf32' to use TF32")
    # Set by ``set_float32_matmul_precision("medium")``, for example.
    if "bf16" in before[3:] and not precision.is_bf32 and rounds_factors():
        said.append(f"BF32 is off, because precision={precision.name!r}; pass 'bf32' to use BF32")
    return said


def float32_backends() -> list[Any]:
    """Return the backends with a precision of float32 products: three on GPUs, three on CPUs.

    Matrix products, convolutions and recurrent layers each have a switch. Those of GPUs are CUDA's:
    no other device of torch has such a switch.
    """
    cudnn: Any = torch.backends.cudnn
    onednn: Any = torch.backends.mkldnn
    gpu = [torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn]
    return [*gpu, onednn.matmul, onednn.conv, onednn.rnn]


def set_float32(values: Sequence[str]) -> None:
    """Set the precision of each of ``float32_backends``.

    The flags are set by torch's older names first, then exactly.

    If the two disagree, torch raises when the older flags are read: ``torch.backends.cudnn.flags``
    reads them, and so does inductor.
    """
    torch.backends.cuda.matmul.allow_tf32 = values[0] == "tf32"
    torch.backends.cudnn.allow_tf32 = values[1] == "tf32"
    if values[3] == "bf16":
        torch.set_float32_matmul_precision("medium")
    for backend, value in zip(float32_backends(), values, strict=True):
        backend.fp32_precision = value


FLOAT32: SharedSetting[Sequence[str]] = SharedSetting(
    lambda: [backend.fp32_precision for backend in float32_backends()], set_float32
)
