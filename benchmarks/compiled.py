"""Compiled beside not compiled on two CPU workers: examples per second, and seconds to compile.

    python benchmarks/compiled.py [--rounds 5] [--steps 40] [--json FILE]

The networks of examples/fashion_mnist.py and examples/cifar10, with random rows, 64 rows per
worker, worker processes, one intra-op thread each; each contender in a run of its own, rounds
interleaved. The first round compiles into an empty cache, the others find it full: seconds are from
the start of the training loop to its first update.
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
import time
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import fashion_mnist
from cifar10 import model as cifar10

import quorate

ROWS, PER_WORKER, WORKERS, WARM_UP = 12_800, 64, 2, 10
NETWORKS = ("fashion_mnist", "cifar10")


def contender(network: str, steps: int, *, is_compiled: bool) -> dict[str, float]:
    """Train, and say how fast it was."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 10, (ROWS,), generator=generator)
    if network == "fashion_mnist":
        images = torch.randint(0, 256, (ROWS, 1, 28, 28), dtype=torch.uint8, generator=generator)
        model, loss = fashion_mnist.Net, fashion_mnist.loss
    else:
        images = torch.randn(ROWS, 3, 28, 28, generator=generator)
        model, loss = cifar10.LeNet5, cifar10.loss
    trainer = quorate.Trainer(
        model,
        loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, nesterov=True),
        batch_size=PER_WORKER * WORKERS,
        shards=WORKERS,
        devices="cpu",
        workers=quorate.Workers(WORKERS, engine="processes"),
        compute=quorate.Compute(compile=is_compiled),
    )
    began = time.perf_counter()
    updates = trainer.updates(TensorDataset(images, labels), steps=WARM_UP + steps)
    next(updates)
    first_s = time.perf_counter() - began
    for _ in range(WARM_UP - 1):
        next(updates)
    began = time.perf_counter()
    for _ in range(steps):
        next(updates)
    speed = PER_WORKER * WORKERS * steps / (time.perf_counter() - began)
    updates.close()
    return {"examples_per_s": speed, "first_update_s": first_s}


def main() -> None:
    """Run the rounds, and print medians and the medians of ratios within a round."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--contender", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        network, mode = options.contender
        torch.manual_seed(0)
        print(json.dumps(contender(network, options.steps, is_compiled=mode == "compiled")))
        return
    found: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
        for _ in range(options.rounds):
            for network in NETWORKS:
                for mode in ("plain", "compiled"):
                    command = [sys.executable, "-m", "quorate", "run", __file__]
                    command += ["--contender", network, mode, "--steps", str(options.steps)]
                    ended = subprocess.run(
                        command, check=True, capture_output=True, text=True, env=environment
                    )
                    result = json.loads(ended.stdout.splitlines()[-1])
                    found.setdefault(f"{network} {mode}", []).append(result)
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}")
    for name, results in found.items():
        speeds = [each["examples_per_s"] for each in results]
        first_s = [each["first_update_s"] for each in results]
        print(
            f"{name:24} {statistics.median(speeds):7,.0f} examples/s   ({min(speeds):,.0f} to "
            f"{max(speeds):,.0f})   first update after {first_s[0]:.1f} s, then "
            f"{statistics.median(first_s[1:] or first_s):.1f} s"
        )
    for network in NETWORKS:
        pairs = zip(found[f"{network} compiled"], found[f"{network} plain"], strict=True)
        ratio = statistics.median(a["examples_per_s"] / b["examples_per_s"] for a, b in pairs)
        print(f"{network}: compiled / plain {ratio:.3f}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
