"""Measurement: whether a processor is much faster at float32 products by oneDNN than by MKL.

MKL uses its widest instructions only on processors of its own maker. So there are two kinds of
processor, with little in between: on some, both libraries take the same time (ratios of 0.9 to 1.2
were seen); on others, MKL takes more than twice as long. The measurement finds the kind of this
processor by two products large enough for the cost of a call not to matter. The result is far from
``CLEARLY`` on both kinds, and so is the same each time, even on a busy machine; the choice of
layers is a function of their shapes (``products.is_large``). Measuring each shape of a model would
choose by noise wherever the times are close, and the bits of the run would depend on noise.
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
    """Return the speed of oneDNN relative to torch, on the shape with the smaller ratio.

    Measured with one thread, for any number of threads of a worker: several threads wait for each
    other and for free cores, possibly in all rounds.
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
        for _ in range(ROUNDS):  # alternating, so that a change of the clock affects both
            times[0].append(_time(lambda: F.linear(x, weight)))
            times[1].append(_time(lambda: onednn.product(x, weight, None)))
    # Other processes make a call longer, never shorter.
    return min(times[0]) / min(times[1])


def _time(call: Callable[[], object]) -> float:
    """Return the duration of a call in seconds."""
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun
