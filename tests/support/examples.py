"""Examples of hypothesis: the same ones in every run, so that a failure is the change's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import settings


def fixed(examples: int = 100) -> Callable[[Any], Any]:
    """Return settings with a number of examples."""
    return settings(max_examples=examples, derandomize=True, deadline=None, database=None)
