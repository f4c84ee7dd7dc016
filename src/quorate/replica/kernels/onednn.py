"""oneDNN's product of float32, by private parts of torch.

They are separate from ``torch_internals``, because no promise of the package needs them: with a
torch that lacks one of them, torch's own kernels are used, and ``--kernels measured`` says so.

torch computes float32 products on x86 processors with MKL, and has no switch for this. The public
ways to oneDNN, a 1x1 convolution and ``Tensor.to_mkldnn``, reorder or copy their inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_torch: Any = torch
_C: Any = torch._C
_switches: Any = torch.backends.mkldnn
# The operator that inductor uses for a linear layer. Arguments: the rows, the weight, the bias, and
# an operation after the product.
_PRODUCT: Any = getattr(getattr(_torch.ops.mkldnn, "_linear_pointwise", None), "default", None)
_functorch: Any = getattr(_C, "_functorch", None)
_transform: Callable[[], object] | None = getattr(_functorch, "peek_interpreter_stack", None)
_forward_ad: Any = torch.autograd.forward_ad


def lacking() -> str | None:
    """Return why this torch cannot make products by oneDNN; None if it can."""
    if not _switches.is_available():
        return f"torch {torch.__version__} has no oneDNN here"
    if _PRODUCT is None or _transform is None or not hasattr(_forward_ad, "_current_level"):
        return f"torch {torch.__version__} lacks private functions that the oneDNN kernels need"
    return None


def product(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return ``rows @ weight.T + bias``; all may have any strides. Autograd does not record it."""
    result: torch.Tensor = _PRODUCT(rows, weight, bias, "none", [], "")
    return result


def is_on() -> bool:
    """Return whether oneDNN is enabled: a script may disable it."""
    return bool(_switches.enabled)


def is_transformed() -> bool:
    """Return whether torch.func or forward-mode differentiation is active in this thread."""
    assert _transform is not None
    return _transform() is not None or _forward_ad._current_level >= 0
