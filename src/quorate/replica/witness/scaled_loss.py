"""Detection of a loss multiplied by a ``GradScaler``, while the loss function is called.

The loss function may reach its scaler in any way: a global, a closure, a bound method, an object of
another library. So the interpreter reports the functions called in this thread, instead of a change
to torch's class.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

from torch.amp import GradScaler

from quorate.replica.shared.code import user_line


class ScaledLoss(NamedTuple):
    """A loss multiplied by the scale of a ``GradScaler``."""

    scale: float
    line: str  # file:line, of the call


class ScalerWatch:
    """A recorder of the scalers whose ``scale`` or ``get_scale`` is called within ``watching``."""

    def __init__(self) -> None:
        self.scalers: list[tuple[GradScaler, str]] = []  # each with the line of its first call

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch this thread's calls in the block; under another profiler, watch nothing.

        ``sys.setprofile`` cannot restore a profiler in C (cProfile).
        """
        if sys.getprofile() is not None:
            yield
            return
        sys.setprofile(self._called)
        try:
            yield
        finally:
            sys.setprofile(None)

    @contextmanager
    def without_scaling(self) -> Iterator[None]:
        """Set the scale of the recorded scalers to 1 inside the block."""
        states = [(scaler, scaler.state_dict()) for scaler, _ in self.scalers]
        try:
            for scaler, state in states:
                scaler.load_state_dict({**state, "scale": 1.0})
            yield
        finally:
            for scaler, state in states:
                scaler.load_state_dict(state)

    def _called(self, frame: FrameType, event: str, _argument: Any) -> None:
        if event != "call" or frame.f_code.co_name not in ("scale", "get_scale"):
            return
        scaler = frame.f_locals.get("self")
        if not isinstance(scaler, GradScaler) or any(scaler is each for each, _ in self.scalers):
            return
        if scaler.is_enabled():
            self.scalers.append((scaler, user_line(frame.f_back)))
