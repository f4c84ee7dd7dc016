"""Updates per second of async on one and two workers, and how long an update stalls a worker.

    python benchmarks/asynchronous.py [--rounds 5] [--steps 120] [--json FILE]

The seed network, 64 rows per shard and update, Nesterov SGD, one intra-op thread per worker
process. Contenders run in turns, each in fresh processes. A worker is stalled while it waits for
its next shard: for the coordinator's message, and for the update that this stands behind, if any.
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
from typing import Any

import torch
from seed_network import Net, data, loss, sgd
from torch.utils.data import TensorDataset

import quorate
from quorate.engines.processes.wire import Wire
from quorate.engines.processes.worker import here
from quorate.engines.processes.worker_messages import ComputeShards, WorkerMessage

CONTENDERS = {"1 worker": 1, "2 workers": 2}
ROWS, WARM_UP = 64, 20
_receive = Wire.receive


class Stalls:
    """In a worker: how long each wait for a shard took, written out now and then."""

    def __init__(self, folder: Path, number: int) -> None:
        self._file = folder / f"worker-{number}.json"
        self._waits_s: list[float] = []
        self._shards_s: list[float] = []
        self._begun = time.perf_counter()

    def receive(self, wire: Wire) -> WorkerMessage | None:
        before = time.perf_counter()
        message = _receive(wire)
        after = time.perf_counter()
        if isinstance(message, ComputeShards):
            self._shards_s.append(before - self._begun)
            self._waits_s.append(after - before)
            if len(self._waits_s) % 20 == 0:
                record = {"waits_s": self._waits_s[1:], "shards_s": self._shards_s[1:]}
                self._file.write_text(json.dumps(record))
        self._begun = time.perf_counter()
        return message


def contend(workers: int, steps: int, folder: Path) -> dict[str, float]:
    """One run; in a worker process this function does not come back."""
    if (worker := here()) is not None:
        stalls = Stalls(folder, worker.number)
        Wire.receive = lambda wire: stalls.receive(wire)  # type: ignore[method-assign]
    trainer = quorate.Trainer(
        Net,
        loss,
        optimizer=sgd,
        batch_size=2 * ROWS,
        shards=2,
        devices="cpu",
        workers=quorate.Workers(workers, engine="processes"),
        update="async",
    )
    begun = 0.0
    staleness = []
    for report in trainer.updates(TensorDataset(*data()), steps=WARM_UP + workers * steps):
        if report.global_step == WARM_UP:
            begun = time.perf_counter()
        staleness.append(report.staleness)
    speed = workers * steps / (time.perf_counter() - begun)
    found = [json.loads(path.read_text()) for path in folder.iterdir()]
    waits, shards = ([v for each in found for v in each[key]] for key in ("waits_s", "shards_s"))
    return {
        "updates/s": speed,
        "staleness": statistics.mean(staleness),
        "shard_ms": 1e3 * statistics.median(shards),
        "stall": sum(waits) / sum(shards),
    }


def main() -> None:
    """Run the rounds and print medians and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=120, help="updates per worker")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        workers = CONTENDERS[options.contender]
        print(json.dumps(contend(workers, options.steps, options.folder)))
        return
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTENDERS}
    for _ in range(options.rounds):
        for name, found in results.items():
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, __file__, "--contender", name, "--folder", folder]
                command += ["--steps", str(options.steps)]
                ended = subprocess.run(command, check=True, capture_output=True, text=True)
            found.append(json.loads(ended.stdout.splitlines()[-1]))
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}")
    for name, found in results.items():
        middle = {key: statistics.median(each[key] for each in found) for key in found[0]}
        print(
            f"async, {name:9}  {middle['updates/s']:6.1f} updates/s  shard "
            f"{middle['shard_ms']:.1f} ms  stalled {middle['stall']:.2%} of it  "
            f"staleness {middle['staleness']:.2f}"
        )
    pairs = zip(results["2 workers"], results["1 worker"], strict=True)
    ratio = statistics.median(two["updates/s"] / one["updates/s"] for two, one in pairs)
    print(f"2 workers / 1 worker: {ratio:.3f}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
