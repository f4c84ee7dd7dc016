"""Bf16 beside fp32 on two CPU workers: examples per second, and what the network is worth.

    python benchmarks/precision.py [--rounds 7] [--steps 60] [--seeds 2] [--json FILE]

Speed: the network, data and optimizer of seed_network.py, 64 rows per worker, each contender in a
process of its own, rounds interleaved. Worth: examples/fashion_mnist.py to its end under each
precision and seed; its test accuracy is computed in the precision that it was trained in.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from seed_network import quorate_on

EXAMPLE = Path(__file__).parent.parent / "examples" / "fashion_mnist.py"
PRECISIONS = ("fp32", "bf16")
ENGINES = ("towers", "processes")


def accuracy(precision: str, seed: int) -> float:
    """Of the main job, on two workers."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "quorate", "run", "--devices", "cpu", "--workers", "2"),
            *("--precision", precision, "--seed", str(seed), "--run-dir", folder, str(EXAMPLE)),
        ]
        ended = subprocess.run(command, check=True, capture_output=True, text=True)
    line = next(s for s in ended.stdout.splitlines() if s.startswith("test accuracy"))
    return float(line.split()[2].rstrip(","))


def main() -> None:
    """Run the rounds, then the trainings, and print medians, ratios and accuracies."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=2, help="trainings of each; 0 for none")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--contender", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        engine, precision = options.contender
        torch.set_num_threads(1)
        torch.manual_seed(0)
        print(json.dumps(quorate_on(engine, 2, options.steps, precision=precision)))
        return
    contenders = [(engine, precision) for engine in ENGINES for precision in PRECISIONS]
    speeds: dict[str, list[float]] = {" ".join(pair): [] for pair in contenders}
    for _ in range(options.rounds):
        for pair in contenders:
            command = [sys.executable, __file__, "--contender", *pair]
            command += ["--steps", str(options.steps)]
            ended = subprocess.run(command, check=True, capture_output=True, text=True)
            speeds[" ".join(pair)].append(json.loads(ended.stdout.splitlines()[-1]))
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}", flush=True)
    for name, found in speeds.items():
        spread = f"{min(found):,.0f} to {max(found):,.0f}"
        print(f"2 {name:16} {statistics.median(found):7,.0f} examples/s   ({spread})")
    ratios = {}
    for engine in ENGINES:
        pairs = zip(speeds[f"{engine} bf16"], speeds[f"{engine} fp32"], strict=True)
        ratios[engine] = statistics.median(bf16 / fp32 for bf16, fp32 in pairs)
        print(f"2 {engine}: bf16 / fp32 {ratios[engine]:.3f}", flush=True)
    reached = {}
    for seed in range(options.seeds):
        reached[seed] = {precision: accuracy(precision, seed) for precision in PRECISIONS}
        listed = ", ".join(f"{name} {value:.4f}" for name, value in reached[seed].items())
        print(f"test accuracy with seed {seed}: {listed}", flush=True)
    if options.json:
        record = {"examples_per_s": speeds, "ratios": ratios, "accuracy": reached}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
