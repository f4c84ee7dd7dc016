"""oneDNN's product of float32: the parts of torch that are private and that it is made of.

They are apart from ``torch_internals``, as nothing that the package promises needs them: a torch
that lacks one has its own kernels, and ``--kernels measured`` says so.

torch gives a product of float32 on an x86 processor to MKL, and has no switch for it. The public
ways to oneDNN, a 1x1 convolution and ``Tensor.to_mkldnn``, reorder or copy what they are given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_torch: Any = torch
_C: Any = torch._C
_switches: Any = torch.backends.mkldnn
# It is what inductor makes of a linear layer: arguments are the rows, the weight, the bias, and
# what comes after the product.
_PRODUCT: Any = getattr(getattr(_torch.ops.mkldnn, "_linear_pointwise", None), "default", None)
_functorch: Any = getattr(_C, "_functorch", None)
_transform: Callable[[], object] | None = getattr(_functorch, "peek_interpreter_stack", None)
_forward_ad: Any = torch.autograd.forward_ad


def lacking() -> str | None:
    """Return why this torch cannot make products by oneDNN; None: it can."""
    if not _switches.is_available():
        return f"torch {torch.__version__} has no oneDNN here"
    if _PRODUCT is None or _transform is None or not hasattr(_forward_ad, "_current_level"):
        return f"torch {torch.__version__} lacks private functions that the oneDNN kernels need"
    return None


def product(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return ``rows @ weight.T + bias``; each may have any strides. Autograd does not see it."""
    result: torch.Tensor = _PRODUCT(rows, weight, bias, "none", [], "")
    return result


def is_on() -> bool:
    """Return whether oneDNN is in use: a script may turn it off."""
    return bool(_switches.enabled)


def is_transformed() -> bool:
    """Return whether torch.func, or forward-mode differentiation, is at work in this thread."""
    assert _transform is not None
    return _transform() is not None or _forward_ad._current_level >= 0
