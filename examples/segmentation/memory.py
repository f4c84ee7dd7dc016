"""How much memory a batch of 64 tiles takes as 1, 2, 4 or 8 shards, and that devices do not matter.

    python examples/segmentation/memory.py                              # towers on the CPU
    python examples/segmentation/memory.py --devices cuda:0 cuda:0,cuda:1

A process for each line makes two updates with so many shards on so many workers, and says the most
memory that it had. More shards on one device are gradient accumulation. The digest is that of the
weights: it depends on the shards, and not on the devices.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import tiles
import torch
from loss import loss_with
from recipe import Recipe, turned

import quorate
from quorate.replica.digest import digest

MIB = 1 << 20


def main() -> None:
    """Print a table; exit with 1 if a digest depends on the devices."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--devices", nargs="+", default=["cpu", "cpu,cpu", "cpu,cpu,cpu,cpu"])
    parser.add_argument("--data", type=Path, help="a folder with bmng.jpg and zones.png")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measured(options)))
        return
    print("shards  devices           peak MiB  of it for training  digest")
    good = True
    for shards in options.shards:
        digests = set()
        for devices in options.devices:
            found = run(options, shards, devices)
            digests.add(found["digest"])
            peak, training = found["peak"] / MIB, (found["peak"] - found["before"]) / MIB
            print(
                f"{shards:>6}  {devices:<16}  {peak:>8,.0f}  {training:>18,.0f}  "
                f"{found['digest'][:16]}",
                flush=True,
            )
        good &= len(digests) == 1
    print("each digest is the same on all devices" if good else "a digest depends on the devices")
    sys.exit(not good)


def run(options: argparse.Namespace, shards: int, devices: str) -> dict[str, Any]:
    """One line's numbers, from a process of its own: memory that was freed is not always less."""
    words = [sys.executable, __file__, "--one", "--batch-size", f"{options.batch_size}"]
    words += ["--shards", f"{shards}", "--devices", devices]
    if options.data is not None:
        words += ["--data", str(options.data)]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"memory.py: {devices}, shards {shards}:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Two updates. Memory in bytes: before them, and the most; of a GPU the one that has most."""
    (devices,), (shards,) = options.devices, options.shards
    recipe = Recipe(batch_size=options.batch_size)
    train, _ = tiles.load(options.data)
    trainer = quorate.Trainer(
        partial(recipe.network, train),
        loss_with(tiles.class_weights(train)),
        loading=quorate.Loading(augment=turned),
        optimizer=recipe.optimizer,
        batch_size=recipe.batch_size,
        shards=shards,
        devices=devices,
        workers=quorate.Workers(engine="towers"),
    )
    gpus = [device for device in dict.fromkeys(devices.split(",")) if device != "cpu"]
    before = most_memory(gpus)
    for _ in trainer.updates(train, steps=2):
        pass
    values = trainer.model.state_dict().items()
    return {"before": before, "peak": most_memory(gpus), "digest": digest(values)}


def most_memory(gpus: Sequence[str]) -> int:
    """The most so far: allocated on a GPU, or resident of this process."""
    if gpus:
        return max(torch.cuda.max_memory_allocated(gpu) for gpu in gpus)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


if __name__ == "__main__":
    main()
