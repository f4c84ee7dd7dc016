"""Draws impossible in stages: from Python's and NumPy's generators, which each process has once.

torch's generator state goes from stage to stage with a shard. Python's and NumPy's generators would
continue from an earlier shard of the same stage, and the difference would go unnoticed: only the
first shard is compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from quorate.errors import CutError
from quorate.replica.turns import drawn_outside


@contextmanager
def none_drawn() -> Iterator[None]:
    """Refuse draws from these generators inside the block.

    Raises:
        CutError: a number was drawn.
    """
    before = drawn_outside()
    try:
        yield
    finally:  # all stages but the last leave the loss function by an exception
        if drawn_outside() != before:
            why = "the model or the loss draws from Python's random or NumPy's generator"
            raise CutError(f"{why}, and each stage has its own", "draw from torch's")
