"""One replica in two stages on two cores, against the same work on one core.

    python benchmarks/pipeline.py [--rounds 7] [--updates 5] [--shards 8] [--schedule 1f1b]
                                  [--rows 512] [--width 256] [--engine processes] [--json FILE]

Blocks of two linear layers with a residual connection, as many in each stage, so that stages take
the same time; SGD. Each shard has ``--rows`` rows. A plain loop with as many micro-batches, quorate
on one device, and on cpu+cpu, cut in the middle. All of them live at once and take their rounds in
turn, so that nobody computes while another does; medians over rounds.

With m shards through p stages no more than m / (m + p - 1) of two cores' time can be work: the
speed-up over one core is p m / (m + p - 1) at most. Printed is the share of this that is reached;
0.85 is wanted. CPU time is that of all processes of a contender: what the stages cost beside the
arithmetic is there, whoever else the machine computes for. Two cores must be there, and idle.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from itertools import count, cycle
from pathlib import Path
from typing import Any, NamedTuple

import torch
from child import Child
from torch import nn
from torch.utils.data import TensorDataset

import quorate

BLOCKS, STAGES, LEAST_SHARE = 8, 2, 0.85
NAMES = ("plain loop", "one device", "cpu+cpu")


class Block(nn.Module):
    """Two linear layers and a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute (rows, width) -> (rows, width)."""
        out: torch.Tensor = x + self.down(torch.relu(self.up(x)))
        return out


class Asked(NamedTuple):
    """What the command line asks for, but for the rounds."""

    shards: int
    rows: int
    width: int
    schedule: str
    engine: str

    def words(self) -> list[str]:
        """Return it as options of this program."""
        return [
            word for name, value in self._asdict().items() for word in (f"--{name}", str(value))
        ]


def net(asked: Asked) -> nn.Module:
    """The model."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(asked.width) for _ in range(BLOCKS)))


def sgd(params: Any) -> torch.optim.Optimizer:
    """The optimizer of all."""
    return torch.optim.SGD(params, lr=1e-3)


def loss(model: Any, batch: Any) -> torch.Tensor:
    """The loss function of all."""
    value: torch.Tensor = (model(batch[0]) - batch[1]).square().mean()
    return value


def data(asked: Asked) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of four updates."""
    generator = torch.Generator().manual_seed(1)
    shape = (4 * asked.shards * asked.rows, asked.width)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def by_hand(asked: Asked) -> Iterator[None]:
    """The plain loop."""
    model, (x, y) = net(asked), data(asked)
    optimizer = sgd(model.parameters())
    for _ in cycle([0]):
        for batch in torch.randperm(len(x)).split(asked.shards * asked.rows):
            for part in batch.split(asked.rows):
                (loss(model, (x[part], y[part])) / asked.shards).backward()
            optimizer.step()
            optimizer.zero_grad()
            yield


def ours(asked: Asked, devices: str) -> Iterator[Any]:
    """Quorate's loop."""
    in_stages = "+" in devices
    trainer = quorate.Trainer(
        lambda: net(asked),
        loss,
        optimizer=sgd,
        batch_size=asked.shards * asked.rows,
        shards=asked.shards,
        devices=devices,
        workers=quorate.Workers(1, engine=asked.engine),
        compute=quorate.Compute(
            split=[str(BLOCKS // STAGES)] if in_stages else None, pipeline=asked.schedule
        ),
    )
    return trainer.updates(TensorDataset(*data(asked)), epochs=1_000_000)


def serve(name: str, asked: Asked) -> None:
    """Make as many updates as each line of standard input says, and print what they took."""
    torch.set_num_threads(1)
    devices = {"one device": "cpu", "cpu+cpu": "cpu+cpu"}
    updates = by_hand(asked) if name == NAMES[0] else ours(asked, devices[name])
    next(updates)  # worker processes run this script up to here, and have no standard input
    print("ready", flush=True)
    for line in sys.stdin:
        cpu_s, begun = cpu_time_s(), time.perf_counter()
        for _ in range(int(line)):
            next(updates)
        took_s = time.perf_counter() - begun
        print(f"took {took_s} {cpu_time_s() - cpu_s}", flush=True)
    close = getattr(updates, "close", None)
    if close is not None:
        close()


def cpu_time_s() -> float:
    """Return the CPU time of this process and of all below it that live."""
    parents, ticks = {}, {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        number = int(folder.name)
        parents[number], ticks[number] = int(fields[1]), int(fields[11]) + int(fields[12])
    family = {os.getpid()}
    for _ in count():
        more = {number for number, parent in parents.items() if parent in family} - family
        if not more:
            break
        family |= more
    return sum(ticks[number] for number in family) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Run the rounds, and print what came of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--schedule", default="1f1b", choices=("1f1b", "gpipe", "zero-bubble"))
    parser.add_argument("--engine", default="processes", choices=("processes", "towers"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    told = parser.parse_args()
    asked = Asked(told.shards, told.rows, told.width, told.schedule, told.engine)
    if told.serve:
        serve(told.serve, asked)
        return
    children = {name: Child(__file__, "--serve", name, *asked.words()) for name in NAMES}
    rounds: dict[str, list[list[float]]] = {name: [] for name in NAMES}  # of a clock, of CPUs
    for round_number in range(told.rounds + 1):
        for name, child in children.items():
            found = [took_s / told.updates for took_s in child.took_s(told.updates)]
            if round_number:  # the first one warms up
                rounds[name].append(found)
    for child in children.values():
        child.close()
    print("| | s per update | CPU s per update |\n|---|---|---|")
    for name, pairs in rounds.items():
        took_s, cpu_s = (statistics.median(column) for column in zip(*pairs, strict=True))
        print(f"| {name} | {took_s:.3f} | {cpu_s:.3f} |")
    most = STAGES * told.shards / (told.shards + STAGES - 1)
    ratios = [
        alone[0] / staged[0]
        for alone, staged in zip(rounds["one device"], rounds["cpu+cpu"], strict=True)
    ]
    speed_up = statistics.median(ratios)
    print(
        f"speed-up {speed_up:.2f} ({min(ratios):.2f} to {max(ratios):.2f}) of {most:.2f} at most: "
        f"{speed_up / most:.2f} of the bound, {LEAST_SHARE} wanted"
    )
    if told.json:
        facts = {"shards": told.shards, "stages": STAGES, "share": speed_up / most}
        told.json.write_text(json.dumps({**rounds, **facts}, indent=1))


if __name__ == "__main__":
    main()
