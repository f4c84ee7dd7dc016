"""Products of float32 by torch (MKL) and by oneDNN: by shape, in an LSTM, in the seed network.

    python benchmarks/kernels.py [--slow-mkl] [--rounds 31] [--trainings 5] [--json FILE]

By shape: the three products of a linear layer, one thread, microseconds, medians of interleaved
rounds; and which of them ``--kernels`` may give to oneDNN. LSTM:
torch's own, which is oneDNN's, and with oneDNN switched off. Seed network: examples per second of
a core that others may have meanwhile, on one tower, 64 rows, each training in a process of its own,
interleaved.

``--slow-mkl`` has MKL compute as on a processor that it knows nothing of, in all of these: most
processors that tests run on are of the kind on which both take the same time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from seed_network import PER_WORKER, WARM_UP, Net, data, loss, sgd
from torch import nn
from torch.utils.data import TensorDataset

import quorate
from quorate.machine.processor import processors
from quorate.replica.kernels import ONEDNN, TORCH, measured, onednn, products

SLOW_MKL = {"MKL_CBWR": "COMPATIBLE"}
# Rows, inputs, outputs: of a perceptron, LeNet-5, the seed network, a transformer, a vocabulary.
SHAPES = (
    *((64, 32, 64), (64, 400, 120), (64, 120, 84), (64, 3136, 1024), (64, 1024, 10)),
    *((8, 512, 512), (32, 512, 512), (64, 256, 256), (64, 512, 512), (256, 256, 256)),
    *((1024, 256, 1024), (2048, 128, 128), (64, 512, 10_000)),
)
PARTS = ("output", "of input", "of weight")
LSTMS = ((128, 20, 64), (512, 20, 32), (256, 50, 16))  # width, time, rows


def in_turn(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median of each call's microseconds."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 2):
        for name, call in calls.items():
            begun = time.perf_counter()
            call()
            if number >= 2:  # the first ones look kernels up
                times[name].append(1e6 * (time.perf_counter() - begun))
    return {name: statistics.median(found) for name, found in times.items()}


def of_shape(rows: int, inputs: int, outputs: int, rounds: int) -> dict[str, float]:
    """Time the products of a layer."""
    x, weight, bias = torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
    grad = torch.randn(rows, outputs)
    return in_turn(
        {
            "output": lambda: F.linear(x, weight, bias),
            "output, oneDNN": lambda: onednn.product(x, weight, bias),
            "of input": lambda: grad.mm(weight),
            "of input, oneDNN": lambda: onednn.product(grad, weight.t(), None),
            "of weight": lambda: grad.t().mm(x),
            "of weight, oneDNN": lambda: onednn.product(grad.t(), x.t(), None),
        },
        rounds,
    )


def of_lstm(width: int, steps: int, rows: int, rounds: int) -> dict[str, float]:
    """Time an LSTM forward and backward."""
    lstm, x = nn.LSTM(width, width), torch.randn(steps, rows, width)

    def trained() -> None:
        lstm(x)[0].sum().backward()

    def without() -> None:
        torch.backends.mkldnn.enabled = False
        trained()
        torch.backends.mkldnn.enabled = True

    return in_turn({"oneDNN": trained, "without": without}, rounds)


def trained(kernels: str, steps: int) -> float:
    """Examples of the seed network per second of a core: others may have the core meanwhile."""
    trainer = quorate.Trainer(
        Net, loss, optimizer=sgd, batch_size=PER_WORKER, shards=1, devices="cpu",
        workers=quorate.Workers(1, engine="towers"), compute=quorate.Compute(kernels=kernels),
    )  # fmt: skip
    begun = 0.0
    for number, _ in enumerate(trainer.updates(TensorDataset(*data()), steps=WARM_UP + steps)):
        if number == WARM_UP - 1:
            begun = time.process_time()
    return PER_WORKER * steps / (time.process_time() - begun)


def by_shape(rounds: int) -> dict[str, dict[str, float]]:
    """Print a line per shape; return their times."""
    print("us by torch / by oneDNN = ratio; and whose they are by shape")
    times = {}
    for shape in SHAPES:
        name = "x".join(map(str, shape))
        found = times[name] = of_shape(*shape, rounds)
        parts = []
        for part in PARTS:
            one, other = found[part], found[f"{part}, oneDNN"]
            parts.append(f"{part} {one:6.0f} /{other:6.0f} = {one / other:.2f}")
        whose = "oneDNN's" if products.is_large(*shape) else "torch's"
        print(f"{name:>14}  {'   '.join(parts)}   {whose}", flush=True)
    return times


def of_lstms(rounds: int) -> dict[str, dict[str, float]]:
    """Print a line per LSTM; return their times."""
    times = {}
    for width, steps, rows in LSTMS:
        found = times[f"{width}"] = of_lstm(width, steps, rows, rounds)
        ratio = found["without"] / found["oneDNN"]
        spent = f"{found['oneDNN'] / 1e3:.1f} ms, without oneDNN {ratio:.2f} times that"
        print(f"LSTM of {width}, {steps} steps, {rows} rows: {spent}", flush=True)
    return times


def of_trainings(rounds: int, steps: int) -> dict[str, list[float]]:
    """Print and return examples per second."""
    speeds: dict[str, list[float]] = {TORCH: [], ONEDNN: []}
    for _ in range(rounds):
        for kernels, speed in speeds.items():
            command = [sys.executable, __file__, "--trained", kernels, "--steps", str(steps)]
            ended = subprocess.run(command, check=True, capture_output=True, text=True)
            speed.append(json.loads(ended.stdout.splitlines()[-1]))
    if rounds:
        of_torch, of_onednn = (statistics.median(speed) for speed in speeds.values())
        pairs = zip(speeds[ONEDNN], speeds[TORCH], strict=True)
        ratio = statistics.median(one / other for one, other in pairs)
        each = f"by torch {of_torch:,.0f}, by oneDNN {of_onednn:,.0f}"
        print(f"examples per second of a core: {each}: {ratio:.3f}")
    return speeds


def main() -> None:
    """Print tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--trainings", type=int, default=5, help="rounds; 0 for none")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--slow-mkl", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--trained", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if options.slow_mkl and SLOW_MKL.items() - os.environ.items():  # read when MKL is loaded
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **SLOW_MKL})
    if options.trained:
        print(json.dumps(trained(options.trained, options.steps)))
        return
    times = measured.how_much_faster()
    print(f"{processors([])[0]}, {os.cpu_count()} cores, torch {torch.__version__}")
    print(f"measured: oneDNN is {times:.2f} times as fast, and taken from {measured.CLEARLY:g} on")
    record = {
        "measured": times,
        "shapes": by_shape(options.rounds),
        "lstm": of_lstms(max(3, options.rounds // 4)),
        "examples_per_s": of_trainings(options.trainings, options.steps),
    }
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
