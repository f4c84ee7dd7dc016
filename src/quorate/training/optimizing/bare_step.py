"""The bare step of an optimizer: without what torch puts around it, where that would do nothing.

It calls hooks, and names the step to a profiler. That takes longer than the step of a small model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from quorate.replica.torch_internals import has_step_hooks, is_profiled


def bare_step(optimizer: Optimizer) -> Callable[[], object] | None:
    """Return the step of a class of torch's, bare; None if something is around it that counts.

    Hooks do, a profiler that listens, and what a schedule or user code has put there.
    """
    step: Any = type(optimizer).step
    is_torchs = _AROUND is not None and getattr(step, "__code__", None) is _AROUND
    if not is_torchs or "step" in vars(optimizer) or has_step_hooks(optimizer) or is_profiled():
        return None
    bare: Callable[[], object] = step.__wrapped__.__get__(optimizer)
    return bare


def is_counted(optimizer: Optimizer) -> bool:
    """Whether nothing is around an optimizer's step but a schedule, which counts its steps."""
    step = type(optimizer).step
    around = getattr(vars(optimizer).get("step"), "__wrapped__", None)
    is_torchs = _AROUND is not None and getattr(step, "__code__", None) is _AROUND
    return is_torchs and around is step and not has_step_hooks(optimizer)


def _around() -> object:
    """Return the code that torch puts around the steps of all classes of optimizers."""
    wrap: Any = getattr(Optimizer, "profile_hook_step", None)
    return None if wrap is None else getattr(wrap(lambda _optimizer: None), "__code__", None)


_AROUND = _around()
