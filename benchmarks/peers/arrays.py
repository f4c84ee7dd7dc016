"""The data of each workload: the same arrays for every peer, in the shapes of the examples'."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = tuple[NDArray[Any], ...]

# Rows per worker and update.
PER_WORKER = {"seed": 64, "lenet5": 64, "chatbot": 32, "unet": 16}

VOCABULARY, PAD, MOST_QUESTION, MOST_ANSWER = 4000, 0, 20, 30
TILE, CLASSES = 256, 4


def arrays(workload: str) -> Arrays:
    """Return the data of a workload, made up; NCHW where there are images."""
    draws = np.random.default_rng(0)
    if workload == "seed":
        images = draws.integers(0, 256, (12_800, 1, 28, 28), dtype=np.uint8)
        return images, draws.integers(0, 10, 12_800)
    if workload == "lenet5":
        images = draws.standard_normal((12_800, 3, 28, 28), dtype=np.float32)
        return images, draws.integers(0, 10, 12_800)
    if workload == "chatbot":
        rows = 6_400
        questions = draws.integers(1, VOCABULARY, (rows, MOST_QUESTION))
        answers = draws.integers(1, VOCABULARY, (rows, MOST_ANSWER + 1))
        # Padded on the right, half a sentence in the mean.
        for words, least in ((questions, 3), (answers, 4)):
            ends = draws.integers(least, words.shape[1] + 1, rows)
            words[np.arange(words.shape[1]) >= ends[:, None]] = PAD
        return questions, answers
    if workload == "unet":
        images = draws.integers(0, 256, (256, 1, TILE, TILE), dtype=np.uint8)
        return images, draws.integers(0, CLASSES, (256, TILE, TILE), dtype=np.uint8)
    raise ValueError(workload)


def order(rows: int, size: int, rank: int = 0, ranks: int = 1) -> Iterator[NDArray[np.int64]]:
    """Yield the rows of batches, epoch after epoch, each in an order of its own; without end.

    Args:
        size: rows of a batch.
        rank: of so many ranks, which share out each epoch.
    """
    draws = np.random.default_rng(0)
    while True:
        shuffled = draws.permutation(rows)[rank::ranks]
        for begin in range(0, len(shuffled) - size + 1, size):
            yield shuffled[begin : begin + size]
