"""Products of linear layers by oneDNN: the layer's output, and both gradients.

Calls of ``torch.nn.functional.linear``, by any layer (``nn.Linear``, attention's projections, the
cells of ``nn.GRU`` and ``nn.RNN``), reach this file in threads that compute a shard of a run with
oneDNN: by a kernel of ``STREAM_KEY``, like random operators in ``replica/streams.py``. Modules,
their hooks and torch's functions stay unchanged. A call takes 3 to 4 us longer, a call computed by
oneDNN 5 us more for each pass.

Whether oneDNN computes a call depends on its shapes alone, and so is the same on all workers. The
three products of a layer have the same size, and are computed by the same library. All other calls
are torch's: small products, other dtypes, autocast, torch.func, forward-mode differentiation,
subclasses of tensors, compiled code; explicit matrix products; ``nn.LSTM``, which uses oneDNN
anyway.

Legend: M rows, K inputs, N outputs of a layer.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from quorate.replica import torch_internals
from quorate.replica.kernels import TORCH, onednn
from quorate.replica.torch_internals import Promise

# oneDNN reorders the weight and looks its kernel up in each call: 15 to 20 us. From 4 million
# multiply-adds on, this is small compared to MKL's time (80 us at 105 GFLOP/s), and with a side
# below 16 there is little to reorder for.
LEAST_SIDE = 16
LEAST_SIZE = 1 << 22

_local = threading.local()


def is_large(rows: int, inputs: int, outputs: int) -> bool:
    """Return whether oneDNN computes products of this size, where chosen."""
    return min(rows, inputs, outputs) >= LEAST_SIDE and rows * inputs * outputs >= LEAST_SIZE


def lacking() -> str | None:
    """Return why this process cannot make products by oneDNN; None if it can."""
    if not torch_internals.holds(Promise.STREAMS):
        return f"torch {torch.__version__} lacks private functions that random streams need"
    return onednn.lacking()


@contextmanager
def by(kernels: str) -> Iterator[None]:
    """Compute the calling thread's linear layers by the given kernels inside the block.

    Only inside a ``Stream``, which enables the dispatch key.
    """
    if kernels == TORCH:
        yield
        return
    _intercept()
    outer = getattr(_local, "is_onednn", False)
    _local.is_onednn = True
    try:
        yield
    finally:
        _local.is_onednn = outer


class GradientChoice:
    """The gradients to compute in a node: all, unless restricted.

    An autograd function in Python is not told which of its gradients a backward pass needs.
    """

    wants_inputs = wants_parameters = True


class _OneDnnLinear(torch.autograd.Function):
    """``rows @ weight.T + bias`` with its derivative, by oneDNN."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.set_materialize_grads(False)
        ctx.part = GradientChoice()
        return onednn.product(rows, weight, bias)

    @staticmethod
    def backward(
        ctx: Any, *grads: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        rows, weight = ctx.saved_tensors  # (M, K), (N, K)
        grad = grads[0]  # (M, N)
        if grad is None:  # no gradient, as for an unused output: torch returns none either
            return None, None, None
        of_rows, of_weight, of_bias = ctx.needs_input_grad
        of_rows = of_rows and ctx.part.wants_inputs
        of_weight, of_bias = (each and ctx.part.wants_parameters for each in (of_weight, of_bias))
        # Gradients are enabled here under create_graph, which needs a second derivative.
        matmul = torch.mm if torch.is_grad_enabled() else _product
        return (
            matmul(grad, weight) if of_rows else None,
            matmul(grad.t(), rows) if of_weight else None,
            grad.sum(0) if of_bias else None,
        )


def _product(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return onednn.product(one, other.t(), None)


@cache
def _intercept() -> torch.library.Library:
    """Register the kernel, once per process; in threads without oneDNN it does nothing."""
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("linear", _linear, torch_internals.STREAM_KEY)
    kept: torch.library.Library = library  # the kernel lives as long as the library
    return kept


def _linear(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    if not (getattr(_local, "is_onednn", False) and _is_ours(rows, weight, bias)):
        with torch_internals.passed_on():
            result: torch.Tensor = torch.ops.aten.linear.default(rows, weight, bias)
            return result
    flat = rows if rows.dim() == 2 else rows.reshape(-1, rows.shape[-1])
    given = (rows, weight) if bias is None else (rows, weight, bias)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given):
        output = _OneDnnLinear.apply(flat, weight, bias)  # type: ignore[no-untyped-call]
    else:
        output = onednn.product(flat, weight, bias)
    shaped: torch.Tensor = output if rows.dim() == 2 else output.view(*rows.shape[:-1], -1)
    return shaped


def _is_ours(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    if weight.dim() != 2 or rows.dim() < 2:
        return False
    outputs, inputs = weight.shape
    if rows.shape[-1] != inputs or not is_large(rows.numel() // max(inputs, 1), inputs, outputs):
        return False  # also for mismatched shapes: torch has the error message
    return (
        _is_plain(rows)
        and _is_plain(weight)
        and (bias is None or (_is_plain(bias) and bias.shape == (outputs,)))
        and onednn.is_on()
        and not torch.is_autocast_enabled("cpu")
        and not onednn.is_transformed()
    )


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.is_cpu
        and tensor.dtype is torch.float32
        and tensor.layout is torch.strided
    )
