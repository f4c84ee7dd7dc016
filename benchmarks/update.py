"""What an update of many parameters costs, beside what memory can do.

    python benchmarks/update.py [--millions 100] [--parts 2] [--optimizer Adam] [--clip]

One process, all cores it may use, float32. Rounds are interleaved; shown are medians and the best.
`copy` copies gradients, parameters and the optimizer's vectors: it reads and writes each of them.
`update` is what quorate does, and `mean` and `step` its two parts. `apart` is the same, operations
on whole vectors: sum, finite check, division, norm if it is clipped, and the step. Bytes are those
that nobody can do without: one vector of each part is read and the mean is written; it is read, and
the parameters and each of the optimizer's vectors are read and written.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from quorate.machine.resources import usable_cores
from quorate.replica.buffers import Buffers
from quorate.replica.flat import Layout
from quorate.replica.model import bind, trainable
from quorate.replica.shard_sum import ShardSum
from quorate.training.optimizing.mean import make_mean, squares
from quorate.training.optimizing.not_finite import are_finite
from quorate.training.optimizing.optimize import Optimize
from quorate.training.optimizing.optimizer import FlatOptimizer
from quorate.training.optimizing.owners import Owners
from quorate.training.optimizing.scheduled_optimizer import ScheduledOptimizer
from quorate.training.optimizing.update import Update

CLIP_NORM = 1e9  # never reached, as most updates of most runs do not


def main() -> None:
    """Run the rounds and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--millions", type=float, default=100, help="of parameters")
    parser.add_argument("--parts", type=int, default=2, help="sums of shards that are added")
    parser.add_argument("--optimizer", default="Adam", help="its name in torch.optim")
    parser.add_argument("--clip", action="store_true", help="with the norm of the gradient")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="keeps the raw numbers")
    options = parser.parse_args()
    cores = usable_cores()
    torch.set_num_threads(cores)
    model = nn.ParameterList([torch.randn(1000, int(options.millions * 1000))])
    parameters = Layout(trainable(model).items()).new(torch.device("cpu"))
    parameters.vectors[0].normal_(std=0.02)
    bind(trainable(model), parameters)
    kind = getattr(torch.optim, options.optimizer)
    optimizer = FlatOptimizer(lambda params: kind(params, lr=1e-6), model, parameters)
    update = Update(
        Owners(parameters),
        [ScheduledOptimizer(optimizer, None, None)],
        Buffers(model),
        Optimize(kind, clip_norm=CLIP_NORM if options.clip else None),
    )
    gradients = [parameters.new() for _ in range(options.parts)]
    spare = parameters.new()

    def fresh() -> None:
        for gradient in gradients:
            gradient.vectors[0].normal_(std=0.01)

    def apart() -> None:
        total = gradients[0]
        for gradient in gradients[1:]:
            total.add_(gradient)
        if not are_finite(total):
            raise ValueError("random numbers are finite")
        total.div_(2.0)
        if options.clip:
            torch.set_num_threads(1)
            squares(total.vectors[0])
            torch.set_num_threads(cores)
        optimizer.take(total, ())
        optimizer.user_optimizer.step()

    additions = [(gradients[0], right) for right in gradients[1:]]

    def mean() -> None:
        torch.set_num_threads(1)
        make_mean(
            gradients[0], additions, 2.0, checks=True, wants_squares=options.clip, cores=cores
        )
        torch.set_num_threads(cores)

    def whole() -> None:
        # As a chain: part n + 1 is added to the sum of the first n.
        parts = [
            ((0, n), ShardSum(1.0, {"loss": 1.0}, gradient)) for n, gradient in enumerate(gradients)
        ]
        update.apply(parts, len(parts), len(parts))

    fresh()
    whole()  # the optimizer makes its vectors
    kept = [
        value
        for value in optimizer.user_optimizer.state[next(iter(optimizer._held))].values()
        if isinstance(value, torch.Tensor) and value.ndim
    ]

    def copy() -> None:
        for vector in (*(each.vectors[0] for each in gradients), *parameters.vectors, *kept):
            spare.vectors[0].copy_(vector)

    # Vectors that are read or written, each counted as often as it has to be.
    of_mean, of_step = options.parts + 1, 1 + 2 * (1 + len(kept))
    rows: dict[str, tuple[int, Callable[[], object]]] = {
        "copy": (2 * (options.parts + 1 + len(kept)), copy),
        "apart": (of_mean + of_step, apart),
        "update": (of_mean + of_step, whole),
        "mean": (of_mean, mean),
        "step": (of_step, lambda: optimizer.step(gradients[0])),
    }
    taken: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(options.rounds):
        for name, (_, do) in rows.items():
            fresh()
            began = time.perf_counter()
            do()
            taken[name].append(time.perf_counter() - began)
    print(
        f"{options.millions:g} M parameters, {options.parts} parts, {options.optimizer}, "
        f"{cores} cores; load {os.getloadavg()[0]:.1f}"
    )
    print("|   | ms, median | best | GB/s, median | best | over copy, median | best |")
    print("|---|---|---|---|---|---|---|")
    gigabytes = parameters.layout.nbytes / 1e9
    pace = {
        name: [vectors * gigabytes / found(taken[name]) for found in (statistics.median, min)]
        for name, (vectors, _) in rows.items()
    }
    for name, times in taken.items():
        cells = [f"{statistics.median(times) * 1e3:.0f}", f"{min(times) * 1e3:.0f}"]
        cells += [f"{each:.1f}" for each in pace[name]]
        cells += [f"{a / b:.2f}" for a, b in zip(pace[name], pace["copy"], strict=True)]
        print(f"| {name} | " + " | ".join(cells) + " |")
    if options.json is not None:
        options.json.write_text(json.dumps({"seconds": taken, "gigabytes_per_s": pace}, indent=1))


if __name__ == "__main__":
    main()
