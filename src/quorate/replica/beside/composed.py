"""Composed losses: functions of ours that call several of the user's. Without torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any


class Composed(ABC):
    """A loss function of ours that calls others, the user's."""

    @property
    @abstractmethod
    def functions(self) -> Mapping[str, Callable[..., Any]]:
        """Those that it calls, by what they are called in messages."""
