"""The bare step of an optimizer: torch's wrapper is skipped where the wrapper has nothing to do.

The wrapper calls hooks, and names the step to a profiler. This takes longer than the step of a
small model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from quorate.replica.torch_internals import has_step_hooks, is_profiled


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
