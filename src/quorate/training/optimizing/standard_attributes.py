"""Attributes that every optimizer has, and that are no state of its own."""

from __future__ import annotations

from functools import cache

import torch

# What schedules put into an optimizer.
_OF_SCHEDULES = frozenset(("step", "_opt_called", "_step_count"))


@cache
def standard_attributes() -> frozenset[str]:
    """Return the names: hooks, and what is in its state_dict.

    Asked for late: torch's first optimizer imports its compiler, which takes as long as torch.
    """
    return _OF_SCHEDULES | frozenset(vars(torch.optim.SGD([torch.zeros(1)], lr=1.0)))
