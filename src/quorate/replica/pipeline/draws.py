"""Draws that stages cannot have: from Python's and NumPy's generators, one of each in a process.

torch's generator goes from stage to stage with a shard. These would go on where an earlier shard of
the same stage left them, and the first shard alone is compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from quorate.errors import CutError
from quorate.replica.turns import drawn_outside


@contextmanager
def none_drawn() -> Iterator[None]:
    """Refuse a block that draws from them.

    Raises:
        CutError: it has.
    """
    before = drawn_outside()
    try:
        yield
    finally:  # all stages but the last leave the loss function by an exception
        if drawn_outside() != before:
            why = "the model or the loss draws from Python's random or NumPy's generator"
            raise CutError(f"{why}, and each stage has its own", "draw from torch's")
