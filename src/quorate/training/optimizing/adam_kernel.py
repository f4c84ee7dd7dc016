"""Adam's fused kernel, called with the arguments of torch's ``step``, without its preparations.

torch's ``step`` sorts tensors by device and dtype, and asks whether a graph is captured, compiled
or scripted: for a small model this takes five times as long as the kernel. Groups on the CPU, with
state and with tensors of one dtype, need none of these preparations.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from quorate.replica.quick.torch_calls import fused_adam, fused_adamw

_KINDS = (torch.optim.Adam, torch.optim.AdamW)  # exact types: a subclass may compute something else
_ENTRIES = {"step", "exp_avg", "exp_avg_sq"}
_REAL = (torch.float32, torch.float64)
_ONE = torch.ones((), dtype=torch.float32, device="cpu")  # saves making a tensor at each call


class _KernelCall(NamedTuple):
    """One call of the kernel: the tensors of one group, as lists of equal length."""

    group: dict[str, Any]
    tensors: list[torch.Tensor]
    gradients: list[torch.Tensor]
    averages: list[torch.Tensor]
    squares: list[torch.Tensor]
    steps: list[torch.Tensor]


def step_by_kernel(optimizer: Optimizer) -> bool:
    """Make a step by the kernel, if the optimizer's ``step`` would only call the kernel.

    The caller has checked that nothing wraps ``step``.

    Returns:
        Whether the step was made. If not, nothing is changed.
    """
    if type(optimizer) not in _KINDS or fused_adam is None or torch.is_grad_enabled():
        return False
    own = vars(optimizer)
    # Attributes set by a ``GradScaler``.
    if own.get("grad_scale") is not None or own.get("found_inf") is not None:
        return False
    calls = []
    for group in optimizer.param_groups:
        if (call := _call(optimizer, group)) is None:
            return False
        calls.append(call)
    for call in calls:
        _make(call)
    return True


def _call(optimizer: Optimizer, group: dict[str, Any]) -> _KernelCall | None:
    """Return the kernel's arguments for a group; None if ``step`` has more to do than the call."""
    if not group["fused"] or group["amsgrad"] or group["capturable"] or group["differentiable"]:
        return None
    if type(group["lr"]) is not float or not all(type(beta) is float for beta in group["betas"]):
        return None
    call = _KernelCall(group, [], [], [], [], [])
    dtype = None
    for tensor in group["params"]:
        if (gradient := tensor.grad) is None:
            continue
        state = dict.get(optimizer.state, tensor)
        if state is None or state.keys() != _ENTRIES or not tensor.is_cpu:
            return None
        dtype = dtype or tensor.dtype
        if tensor.dtype is not dtype or dtype not in _REAL or gradient.is_sparse:
            return None
        call.tensors.append(tensor)
        call.gradients.append(gradient)
        call.averages.append(state["exp_avg"])
        call.squares.append(state["exp_avg_sq"])
        call.steps.append(state["step"])
    return call


def _make(call: _KernelCall) -> None:
    if not call.tensors:
        return
    for step in call.steps:
        step.add_(_ONE)
    group = call.group
    beta1, beta2 = group["betas"]
    kernel = fused_adamw if group.get("decoupled_weight_decay") else fused_adam
    assert kernel is not None
    kernel(
        call.tensors,
        call.gradients,
        call.averages,
        call.squares,
        [],
        call.steps,
        amsgrad=False,
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
        grad_scale=None,
        found_inf=None,
    )
