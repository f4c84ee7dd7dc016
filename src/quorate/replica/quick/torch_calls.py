"""The parts of torch that are private, and that save time around every shard.

They are apart from ``torch_internals``, as nothing that the package promises needs them: where a
torch lacks one, the public way is taken, which gives the same.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.overrides import has_torch_function

from quorate.replica.quick.factors import factor_of

_C: Any = torch._C
_count_modes: Callable[[], int] | None = getattr(_C, "_len_torch_function_stack", None)
_run_backward: Callable[..., object] | None = None
with suppress(ImportError):
    # Calls autograd's engine, with logging and the context that its threads want.
    from torch.autograd.graph import _engine_run_backward as _run_backward
_unscale: Callable[..., None] | None = getattr(
    torch, "_amp_foreach_non_finite_check_and_unscale_", None
)
_LEAST, _MOST = 2.0**-126, 2.0**127  # of a float32, but for its denormal numbers
_NO_MODE = nullcontext()
_of_thread = threading.local()  # an updating thread's flag for it
# The kernels that Adam(fused=True) and AdamW(fused=True) call. None if one of them has gone.
fused_adam: Callable[..., None] | None = getattr(torch, "_fused_adam_", None)
fused_adamw: Callable[..., None] | None = getattr(torch, "_fused_adamw_", None)
if fused_adamw is None:
    fused_adam = None
# By type of node; weakly, as user code makes such types too.
_saved_of: WeakKeyDictionary[type, tuple[str, ...]] = WeakKeyDictionary()


def derive(loss: torch.Tensor, mode: AbstractContextManager[object] | None = None) -> None:
    """Do what ``torch.autograd.backward(loss)`` does to a real scalar, without looking at it.

    That it is one, and has a gradient, is known of a loss that was read. To find it out again, and
    which of three kinds of arguments were given, takes torch an eighth of a small backward pass.

    Args:
        loss: a real scalar.
        mode: within which autograd calls user code, of checkpoints say: ``torch.autograd.backward``
            takes a mode of torch's functions off before. Without ``_engine_run_backward`` not used.
    """
    roots = (loss,)
    if _run_backward is None or has_torch_function(roots):
        torch.autograd.backward(loss)
        return
    ones = (torch.ones_like(loss),)
    with mode or _NO_MODE:
        _run_backward(roots, ones, False, False, (), allow_unreachable=True, accumulate_grad=True)


def is_finite_times(vector: torch.Tensor, factor: float) -> bool | None:
    """Multiply a vector of the host by a factor, and return whether all in it is finite.

    One operation in the place of three, which tells where a vector is short. What a scaler of
    gradients calls.

    Args:
        vector: float32 or float64.
        factor: a power of two; it reaches the operation as float32.

    Returns:
        None: it is as it was, as this torch has no such operation, or float32 no such factor.
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
    """Return whether what this thread makes without a device is on the CPU.

    A default device is a mode of the thread's: without any mode there is none.
    """
    if _count_modes is not None and _count_modes() == 0:
        return True
    return torch.get_default_device().type == "cpu"


def reader(public: Callable[[], Any], name: str) -> Callable[[], Any]:
    """Return what a public function of torch reads a switch with: itself, if that has gone."""
    found: Callable[[], Any] = getattr(_C, name, public)
    return found


def float32_reader(public: Callable[[], Any]) -> Callable[[], Any]:
    """Return what reads the precision of float32 on GPUs, as a public function does, in 0.3 us."""
    # CUDA's alone: see ``precision.float32_backends``.
    read: Callable[[str, str], str] | None = getattr(_C, "_get_fp32_precision_getter", None)
    if read is None:
        return public
    return lambda: (read("cuda", "matmul"), read("cuda", "conv"), read("cuda", "rnn"))


def keeps_plainly(node: Any) -> bool:
    """Return whether a node of a graph has what it saved as it was, and no hook brings it back.

    Hooks may compute it again (checkpoints), or copy it from elsewhere. A torch that does not tell
    has none that keep plainly.
    """
    kind: Any = type(node)
    for name in _saved(kind):
        saved = getattr(node, name)
        for each in saved if isinstance(saved, tuple) else (saved,):
            if getattr(each, "unpack_hook", each) is not None:
                return False
    return True


def _saved(kind: type) -> tuple[str, ...]:
    """Return the names of what nodes of a type have saved."""
    if kind not in _saved_of:
        _saved_of[kind] = tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))
    return _saved_of[kind]


def address_of(generator: torch.Generator) -> int | None:
    """Return where in memory a generator's object is, as long as it is that one; None: unknown."""
    address: int | None = getattr(generator, "_cdata", None)
    return address
