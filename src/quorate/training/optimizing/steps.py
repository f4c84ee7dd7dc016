"""Steps of torch's optimizers: without the wrapper, by a kernel, or in blocks; the bits are equal.

A bare step skips torch's wrapper where the wrapper has nothing to do: the wrapper calls hooks, and
names the step to a profiler. This takes longer than the step of a small model.

Adam's fused kernel is called with the arguments of torch's ``step``, without its preparations:
``step`` sorts tensors by device and dtype, and asks whether a graph is captured, compiled or
scripted, which for a small model takes five times as long as the kernel. Groups on the CPU, with
state and with tensors of one dtype, need none of these preparations.

Steps in blocks are for optimizers without a fused kernel, over vectors larger than any cache. Such
a step is a dozen operations; each reads whole vectors and allocates new ones. If a step is made
block by block, intermediate vectors stay in a core's cache, and take no memory. The bits of an
element are the same, because blocks begin where vector registers begin too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from quorate.replica.quick.torch_calls import fused_adam, fused_adamw
from quorate.replica.torch_internals import has_step_hooks, is_profiled
from quorate.training.optimizing import cores as _cores
from quorate.training.optimizing.known_optimizers import is_by_element, piece_of_state, values_of
from quorate.training.optimizing.mean import SPAN

_State = dict[str, Any]


class _Stretch(NamedTuple):
    """A stretch of one of an optimizer's tensors."""

    group: dict[str, Any]
    tensor: torch.Tensor
    state: _State
    span: slice


def step_flat(optimizer: Optimizer, elements: int) -> bool:
    """Make a step of an element-wise optimizer whose tensors have their gradients.

    Args:
        elements: number of elements of the vectors of all parameters, on all ranks.

    Returns:
        Whether only torch's own code ran.
    """
    step = bare_step(optimizer)
    is_alone = step is not None or is_counted(optimizer)
    if is_alone and elements >= _cores.ALL_CORES_FROM and _can_be_cut(optimizer):
        _step_in_blocks(optimizer, _cores.cores_for(elements))
        if step is None:
            _step_of_nothing(optimizer)
    elif step is not None and step_by_kernel(optimizer):
        pass
    elif all(group.get("fused") for group in optimizer.param_groups):
        (step or optimizer.step)()
    else:
        # Fused kernels cut vectors between cache lines. Unfused operations cut vectors anywhere,
        # and the elements left over from a vector register may have other bits, for example in
        # bfloat16.
        with _cores.intra_op_threads(1):
            (step or optimizer.step)()
    return is_alone


def _can_be_cut(optimizer: Optimizer) -> bool:
    return all(
        not group.get("fused") and not group.get("capturable") and _is_begun(optimizer, tensor)
        for group in optimizer.param_groups
        for tensor in group["params"]
        if tensor.grad is not None
    )


def _step_in_blocks(optimizer: Optimizer, cores: int) -> None:
    blocks = list(_blocks(optimizer))

    def run(first: int, end: int) -> list[tuple[_State, _State]]:
        return _step(type(optimizer), blocks[first:end])

    for begun in _cores.side_by_side(run, len(blocks), cores):
        for state, counted in begun:
            for entry, value in counted.items():
                if isinstance(state[entry], torch.Tensor):
                    state[entry].copy_(value)
                else:
                    state[entry] = value


def _is_begun(optimizer: Optimizer, tensor: torch.Tensor) -> bool:
    """Return whether a tensor on the host has all its state: after a first step, but for SGD."""
    values = optimizer.state.get(tensor, {}).values()
    return tensor.device.type == "cpu" and len(values) > 0 and all(v is not None for v in values)


def _blocks(optimizer: Optimizer) -> Iterator[_Stretch]:
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            if tensor.grad is not None:
                state = optimizer.state[tensor]
                for start in range(0, tensor.numel(), SPAN):
                    yield _Stretch(group, tensor, state, slice(start, start + SPAN))


def _step(kind: type[Optimizer], blocks: Sequence[_Stretch]) -> list[tuple[_State, _State]]:
    """Make the step of some blocks.

    Returns:
        For each tensor whose first block is among the blocks: its state, and the new values of the
            entries without an element per parameter element (counters).
    """
    counted = []
    for group, own_blocks in _by_group(blocks):
        nothing = torch.nn.Parameter(torch.empty(0))
        own = kind([{**values_of(group), "params": [nothing]}])  # type: ignore[call-arg]
        for block in own_blocks:
            entries = _step_of(own, block)
            if block.span.start == 0:
                counted.append((block.state, entries))
    return counted


def _step_of(own: Optimizer, block: _Stretch) -> _State:
    """Make the step of a block in place; return the state entries without a value per element."""
    tensor, span = block.tensor, block.span
    assert tensor.grad is not None
    piece = torch.nn.Parameter(tensor.detach()[span])
    piece.grad = tensor.grad[span]
    given = {
        entry: piece_of_state(entry, value, span.start, SPAN)
        for entry, value in block.state.items()
    }
    own.param_groups[0]["params"] = [piece]
    own.state.clear()
    own.state[piece] = dict(given)
    (bare_step(own) or own.step)()
    counted = {}
    for entry, value in own.state[piece].items():
        if not is_by_element(entry, value):
            counted[entry] = value
        elif value is not given[entry]:
            given[entry].copy_(value)
    return counted


def _by_group(blocks: Iterable[_Stretch]) -> Iterator[tuple[dict[str, Any], list[_Stretch]]]:
    found: dict[int, tuple[dict[str, Any], list[_Stretch]]] = {}
    for block in blocks:
        found.setdefault(id(block.group), (block.group, []))[1].append(block)
    yield from found.values()


def _step_of_nothing(optimizer: Optimizer) -> None:
    """Make a step without gradients, so that a schedule counts the step."""
    tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    gradients = [tensor.grad for tensor in tensors]
    for tensor in tensors:
        tensor.grad = None
    optimizer.step()
    for tensor, gradient in zip(tensors, gradients, strict=True):
        tensor.grad = gradient


# --- Adam's kernel --------------------------------------------------------------------------------

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
    if {type(group["lr"]), *map(type, group["betas"])} != {float}:
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


# --- the bare step --------------------------------------------------------------------------------


def bare_step(optimizer: Optimizer) -> Callable[[], object] | None:
    """Return the bare step of an optimizer of torch; None if the wrapper around the step matters.

    The wrapper matters if there are hooks, if a profiler listens, or if a schedule or user code has
    replaced ``step``.
    """
    step: Any = type(optimizer).step
    is_torchs = _AROUND is not None and getattr(step, "__code__", None) is _AROUND
    if not is_torchs or "step" in vars(optimizer) or has_step_hooks(optimizer) or is_profiled():
        return None
    bare: Callable[[], object] = step.__wrapped__.__get__(optimizer)
    return bare


def is_counted(optimizer: Optimizer) -> bool:
    """Return whether only a schedule wraps an optimizer's step, to count steps."""
    step = type(optimizer).step
    around = getattr(vars(optimizer).get("step"), "__wrapped__", None)
    is_torchs = _AROUND is not None and getattr(step, "__code__", None) is _AROUND
    return is_torchs and around is step and not has_step_hooks(optimizer)


def _around() -> object:
    """Return the code object of torch's wrapper around ``step`` of all optimizer classes."""
    wrap: Any = getattr(Optimizer, "profile_hook_step", None)
    return None if wrap is None else getattr(wrap(lambda _optimizer: None), "__code__", None)


_AROUND = _around()
