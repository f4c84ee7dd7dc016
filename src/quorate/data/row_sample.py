"""A sample of rows: detects whether a resumed run has the dataset from the start of the run.

A different dataset with equally many rows would train without error, and the change would go
unnoticed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quorate.coordination.plan import Plan
from quorate.data.source import Source
from quorate.errors import DataError

ROWS = 8  # number of sampled rows: loading a row may be slow


def row_sample(dataset: Any, rows: int, seed: int) -> dict[str, str | None]:
    """Return hashes of rows spread over a dataset, including the first and the last row.

    Args:
        rows: number of rows of the dataset.
        seed: seed of the random numbers that the dataset draws for a row.

    Returns:
        The hashes by row number. None for a row whose values differ between two loads, or that
        cannot be loaded.
    """
    chosen = np.unique(np.linspace(0, rows - 1, num=min(ROWS, rows)).round().astype(np.int64))
    plan = Plan(
        rows=rows,
        batch_size=len(chosen),
        shards=1,
        seed=seed,
        shuffle=False,
        order=lambda every: np.concatenate([chosen, np.setdiff1d(every, chosen)]),
    )
    source = Source(dataset, plan, collate=lambda _samples: None)
    source.hashes_samples = True
    first, second = (_hashes(source, len(chosen)) for _ in range(2))
    pairs = zip(first, second, strict=True)
    kept = [one[:16] if one is not None and one == other else None for one, other in pairs]
    return dict(zip(map(str, chosen.tolist()), kept, strict=True))


def _hashes(source: Source, rows: int) -> list[str | None]:
    try:
        return [*source.load((0, 0)).samples]
    except DataError:
        raise
    except Exception:  # user code: raises again in the row's shard, with a report
        return [None] * rows
