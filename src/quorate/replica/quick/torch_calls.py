"""Private parts of torch that save time around every shard.

They are separate from ``torch_internals``, because no promise of the package needs them: where
torch lacks one of them, the public function is used, with the same result.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.overrides import has_torch_function

from quorate.replica.quick.factors import factor_of

_C: Any = torch._C
_count_modes: Callable[[], int] | None = getattr(_C, "_len_torch_function_stack", None)
_run_backward: Callable[..., object] | None = None
with suppress(ImportError):
    # Calls autograd's engine, with logging and the context for its threads.
    from torch.autograd.graph import _engine_run_backward as _run_backward
_unscale: Callable[..., None] | None = getattr(
    torch, "_amp_foreach_non_finite_check_and_unscale_", None
)
_LEAST, _MOST = 2.0**-126, 2.0**127  # of a float32, without its denormal numbers
_of_thread = threading.local()  # a flag tensor of each updating thread
# The kernels called by Adam(fused=True) and AdamW(fused=True). None if one is missing.
fused_adam: Callable[..., None] | None = getattr(torch, "_fused_adam_", None)
fused_adamw: Callable[..., None] | None = getattr(torch, "_fused_adamw_", None)
if fused_adamw is None:
    fused_adam = None
# By type of node; weak keys, because user code makes such types too.
_saved_of: WeakKeyDictionary[type, tuple[str, ...]] = WeakKeyDictionary()


def derive(loss: torch.Tensor, mode: AbstractContextManager[object] | None = None) -> None:
    """Compute ``torch.autograd.backward(loss)`` for a real scalar, without checks.

    A loss that was read is known to be a scalar with a gradient. Checking this again, and the kinds
    of arguments, takes torch an eighth of a small backward pass.

    Args:
        loss: a real scalar.
        mode: context in which autograd calls user code, such as checkpoints:
            ``torch.autograd.backward`` removes a mode of torch's functions before. Not used without
            ``_engine_run_backward``.
    """
    roots = (loss,)
    if _run_backward is None or has_torch_function(roots):
        torch.autograd.backward(loss)
        return
    arguments = roots, (torch.ones_like(loss),), False, False, ()
    if mode is None:
        _run_backward(*arguments, allow_unreachable=True, accumulate_grad=True)
        return
    with mode:
        _run_backward(*arguments, allow_unreachable=True, accumulate_grad=True)


def is_finite_times(vector: torch.Tensor, factor: float) -> bool | None:
    """Multiply a vector on the host by a factor, and return whether all elements are finite.

    A single operation instead of three, faster for a short vector. The operation is that of
    gradient scalers.

    Args:
        vector: float32 or float64.
        factor: a power of two; converted to float32.

    Returns:
        None: nothing was done, because this torch lacks the operation, or float32 cannot hold the
            factor.
    """
    if _unscale is None or not _LEAST <= factor <= _MOST:
        return None
    odd: torch.Tensor | None = getattr(_of_thread, "odd", None)
    if odd is None:
        with torch.inference_mode(False):
            _of_thread.odd = odd = torch.zeros((), dtype=torch.float32, device="cpu")
    _unscale([vector], odd, factor_of(factor, torch.float32))
    if odd.item() == 0:
        return True
    odd.zero_()
    return False


def makes_on_cpu() -> bool:
    """Return whether tensors made by this thread without a device are on the CPU.

    A default device is a mode of the thread: without any mode there is no default device.
    """
    if _count_modes is not None and _count_modes() == 0:
        return True
    return torch.get_default_device().type == "cpu"


def reader(public: Callable[[], Any], name: str) -> Callable[[], Any]:
    """Return the private reader of a switch; the public function if it is missing."""
    found: Callable[[], Any] = getattr(_C, name, public)
    return found


def float32_reader(public: Callable[[], Any]) -> Callable[[], Any]:
    """Return a reader of the float32 precisions on GPUs, as fast as 0.3 us if possible."""
    # CUDA only: see ``precision.float32_backends``.
    read: Callable[[str, str], str] | None = getattr(_C, "_get_fp32_precision_getter", None)
    if read is None:
        return public
    return lambda: (read("cuda", "matmul"), read("cuda", "conv"), read("cuda", "rnn"))


def keeps_plainly(node: Any) -> bool:
    """Return whether the saved tensors of a graph's node are unchanged, without an unpack hook.

    Hooks may recompute them (checkpoints), or copy them from elsewhere. For a torch that does not
    tell, no node counts as plain.
    """
    kind: Any = type(node)
    for name in _saved(kind):
        saved = getattr(node, name)
        for each in saved if isinstance(saved, tuple) else (saved,):
            if getattr(each, "unpack_hook", each) is not None:
                return False
    return True


def _saved(kind: type) -> tuple[str, ...]:
    """Return the names of the saved tensors of a type of nodes."""
    if kind not in _saved_of:
        _saved_of[kind] = tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))
    return _saved_of[kind]


def address_of(generator: torch.Generator) -> int | None:
    """Return the address of a generator's object, valid while it lives; None: unknown."""
    address: int | None = getattr(generator, "_cdata", None)
    return address
