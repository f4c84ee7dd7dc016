"""Examples of hypothesis: the same in every run, so a failure comes from the change."""

from collections.abc import Callable
from typing import Any

from hypothesis import settings


def fixed(examples: int = 100) -> Callable[[Any], Any]:
    """Return settings with a number of examples."""
    return settings(max_examples=examples, derandomize=True, deadline=None, database=None)
