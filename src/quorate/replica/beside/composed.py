"""Composed losses: functions of quorate that call several user functions. Without torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any


class Composed(ABC):
    """A loss function of quorate that calls functions of the user."""

    @property
    @abstractmethod
    def functions(self) -> Mapping[str, Callable[..., Any]]:
        """The user's functions, by their names in messages."""
