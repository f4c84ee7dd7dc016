"""Measured: whether a processor makes products of float32 much faster by oneDNN than by MKL.

MKL takes its widest instructions on processors of its own maker alone. So there are two kinds of
processor, and little in between: those on which both take the same time (ratios of 0.9 to 1.2 were
seen), and those on which MKL takes more than twice as long. What is asked here is which kind this
is, by two products that are large enough for neither library's cost per call to matter. The answer
is far from ``CLEARLY`` on both kinds, and so is the same each time, whatever else is running; which
layers it is for is a function of their shapes (``products.is_large``). A measurement of each shape
of a model would choose by noise wherever the two are close, and with it the bits of the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from quorate.replica.kernels import onednn

# M, K, N: 0.2 ms each at 170 GFLOP/s.
SHAPES = ((256, 256, 256), (64, 512, 512))
ROUNDS = 16  # 20 ms in all
CLEARLY = 1.6  # the geometric mean of 1.1 and 2.4


def how_much_faster() -> float:
    """Return how many times as fast oneDNN is on the shape where that is less.

    By one thread, however many a worker has: several wait for each other, and for a core that is
    free, which may be long in all rounds.
    """
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        return min(_ratio(*shape) for shape in SHAPES)
    finally:
        torch.set_num_threads(threads)


def _ratio(rows: int, inputs: int, outputs: int) -> float:
    # Constants: the time does not depend on values, and no random number is drawn.
    x, weight = torch.ones(rows, inputs), torch.ones(outputs, inputs)
    times: tuple[list[float], list[float]] = [], []
    with torch.no_grad():
        for _ in range(ROUNDS):  # in turns, so that a change of the clock hits both
            times[0].append(_time(lambda: F.linear(x, weight)))
            times[1].append(_time(lambda: onednn.product(x, weight, None)))
    # What else is running makes a call longer, and never shorter.
    return min(times[0]) / min(times[1])


def _time(call: Callable[[], object]) -> float:
    """Return seconds."""
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun
