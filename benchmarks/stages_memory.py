"""What each process of a model in stages holds: its part of everything, however many shards.

    python benchmarks/stages_memory.py [--millions 16] [--rows 128] [--json FILE]

A perceptron of two halves with Adam is trained in one piece, and cut in two at 8 and at 32 shards
of as many rows, under both schedules. After some updates each process's pages are counted: those of
its own (activations, which it keeps for the next shard, and Python), and those of shared memory
that it has mapped by touching them: parameters, sums of gradients, what the optimizer keeps.
A page of shared memory that two have touched counts in both columns ``shared``, and half in each
``Pss``. Nothing in it depends on how fast the machine is. Linux.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import quorate

UPDATES = 3
LAYERS = 8  # of each half
MIB = 1 << 20


class Halves(nn.Module):
    """Two perceptrons, one behind the other."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.encoder, self.decoder = half(width), half(width)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.decoder(self.encoder(values))
        return logits


def half(width: int) -> nn.Sequential:
    """Return half of the model."""
    layers = ([nn.Linear(width, width), nn.Tanh()] for _ in range(LAYERS))
    return nn.Sequential(*itertools.chain.from_iterable(layers))


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Return the mean square of what comes out."""
    values: torch.Tensor = model(*batch)
    return values.square().mean()


def held(pid: int) -> dict[str, float]:
    """Return what a process holds, in MiB."""
    rolled = _fields(Path(f"/proc/{pid}/smaps_rollup"))
    status = _fields(Path(f"/proc/{pid}/status"))
    return {
        "own": (rolled["Private_Dirty"] + rolled["Private_Clean"] - _private_shared(pid)) / 1024,
        "shared": status["RssShmem"] / 1024,
        "pss": rolled["Pss"] / 1024,
    }


def _private_shared(pid: int) -> int:
    """Return the KiB of shared memory that nobody else has touched: counted as private too."""
    total, is_ours = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        head = line.partition(" ")[0]
        if "-" in head and not head.endswith(":"):
            is_ours = "memfd:quorate" in line
        elif is_ours and head in ("Private_Dirty:", "Private_Clean:"):
            total += int(line.split()[1])
    return total


def _fields(file: Path) -> dict[str, int]:
    lines = (line.split() for line in file.read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) for words in lines if words[-1] == "kB"}


def train(width: int, rows: int, shards: int, schedule: str) -> dict[str, Any]:
    """Train, and return what each process holds in the end."""
    torch.manual_seed(0)
    stages = schedule != "one piece"
    trainer = quorate.Trainer(
        Halves(width),
        loss,
        optimizer=lambda params: torch.optim.Adam(params, lr=1e-4),
        batch_size=rows * shards,
        shards=shards,
        devices="cpu+cpu" if stages else "cpu",
        workers=quorate.Workers(1, engine="towers"),
        compute=quorate.Compute(split=["decoder"], pipeline=schedule) if stages else None,
    )
    data = TensorDataset(torch.randn(rows * shards * UPDATES, width))
    found: dict[str, Any] = {}
    for report in trainer.updates(data, epochs=1):
        if report.global_step == UPDATES:
            children = {p.name.removeprefix("quorate-"): p.pid for p in active_children()}
            found = {"main": held(os.getpid())}
            found |= {name: held(pid) for name, pid in sorted(children.items()) if pid is not None}
    nbytes = 4 * sum(p.numel() for p in trainer.model.parameters())
    return {"parameters": nbytes / MIB, "processes": found}


def main() -> None:
    """Train in a process each, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--millions", type=float, default=16, help="parameters")
    parser.add_argument("--rows", type=int, default=128, help="of a shard")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    width = int((args.millions * 1e6 / (2 * LAYERS)) ** 0.5) // 64 * 64
    if args.child is not None:
        schedule, shards = args.child
        print(json.dumps(train(width, args.rows, int(shards), schedule)))
        return
    runs = []
    for schedule, shards in itertools.product(("one piece", "1f1b", "gpipe"), (8, 32)):
        words = [sys.executable, __file__, "--millions", str(args.millions)]
        words += ["--rows", str(args.rows), "--child", schedule, str(shards)]
        output = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout
        runs.append({"schedule": schedule, "shards": shards, **json.loads(output.splitlines()[-1])})
    print(f"parameters {runs[0]['parameters']:.0f} MiB, so Adam's state twice as much; in MiB:")
    print(f"{'':10} {'shards':>6}  {'process':8} {'own':>6} {'shared':>6} {'Pss':>6}")
    for run in runs:
        for name, each in run["processes"].items():
            figures = " ".join(f"{each[column]:6.0f}" for column in ("own", "shared", "pss"))
            print(f"{run['schedule']:10} {run['shards']:>6}  {name:8} {figures}")
    if args.json is not None:
        args.json.write_text(json.dumps(runs, indent=1))


if __name__ == "__main__":
    main()
