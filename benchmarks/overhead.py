"""What an update costs beside its arithmetic, at 1, 2, 4 and 8 shards.

    python benchmarks/overhead.py [--rounds 7] [--updates 200] [--json FILE] [--peers]
    python benchmarks/overhead.py --width 16384 --shards 2 --updates 50
    git worktree add ../base COMMIT; python benchmarks/overhead.py --base ../base

A perceptron of 32, 64 and 4, 64 rows, Adam, one thread per worker. Milliseconds per update, medians
over rounds, of a plain loop with as many micro-batches (fused Adam), and of quorate on one worker,
on two towers and on two worker processes; with --peers also of Fabric and Accelerate, if they are
installed. All of them live in one process each and take their rounds in turn; nobody computes while
another does. The bound is what the project promises for one worker: plain + 0.15 + 0.05 * V ms.
With another --width, of the hidden layer, a shard takes as long as one likes: from how long on is a
second worker worth it? With --base, a checkout of another commit, two more contenders of each kind
run that commit's code. The rows "now / base" are medians of the ratios within a round; the rows
"base / base" compare the two that run the same code, and so show the noise.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from child import Child
from torch import nn
from torch.utils.data import TensorDataset

import quorate

ROWS, BATCH = 12_800, 64
WIDTH = 64  # of the hidden layer; worker processes run the command line too, and so know another
SHARDS = (1, 2, 4, 8)
WORKERS = {"quorate, one": (1, "towers"), "two towers": (2, "towers"), "two processes": (2, None)}
BASES = ("base", "base again")
PEERS = {"Fabric": "lightning", "Accelerate": "accelerate"}


def net() -> nn.Module:
    """The perceptron."""
    return nn.Sequential(nn.Linear(32, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4))


def adam(params: Any) -> torch.optim.Optimizer:
    """The optimizer of all."""
    return torch.optim.Adam(params, lr=1e-3, fused=True)


def loss(model: Any, batch: Any) -> torch.Tensor:
    """The loss function of all."""
    return F.cross_entropy(model(batch[0]), batch[1])


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """The rows."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, 32, generator=generator)
    return x, torch.randint(0, 4, (ROWS,), generator=generator)


Backward = Callable[[torch.Tensor], None]


def loop(shards: int, model: Any, optimizer: Any, backward: Backward) -> Iterator[None]:
    """One update each: so many micro-batches, whose loss is read, as a loop that logs does."""
    x, y = data()
    for _ in cycle([0]):
        for rows in torch.randperm(ROWS).split(BATCH):
            for part in rows.chunk(shards):
                value = loss(model, (x[part], y[part]))
                backward(value / shards)
                value.item()
            optimizer.step()
            optimizer.zero_grad()
            yield


def by_hand(shards: int) -> Iterator[None]:
    """The plain loop."""
    model = net()
    return loop(shards, model, adam(model.parameters()), lambda value: value.backward())


def fabric(shards: int) -> Iterator[None]:
    """Fabric's model, optimizer and backward in the plain loop."""
    from lightning.fabric import Fabric

    made = Fabric(accelerator="cpu", devices=1)
    made.launch()
    model = net()
    model, optimizer = made.setup(model, adam(model.parameters()))
    return loop(shards, model, optimizer, made.backward)


def accelerate(shards: int) -> Iterator[None]:
    """Accelerate's model, optimizer and backward in the plain loop."""
    from accelerate import Accelerator

    made = Accelerator(cpu=True)
    model = net()
    model, optimizer = made.prepare(model, adam(model.parameters()))
    return loop(shards, model, optimizer, made.backward)


def ours(shards: int, workers: int, engine: str | None) -> Iterator[Any]:
    """Quorate's loop."""
    trainer = quorate.Trainer(
        net,
        loss,
        optimizer=adam,
        batch_size=BATCH,
        shards=shards,
        devices="cpu",
        workers=quorate.Workers(workers, engine=engine or "processes"),
    )
    return trainer.updates(TensorDataset(*data()), epochs=1_000_000)


def contenders(names: list[str]) -> dict[str, Callable[[int], Iterator[Any]]]:
    """Return by name what makes the updates of a contender for a number of shards."""
    known: dict[str, Callable[[int], Iterator[Any]]] = {"plain loop": by_hand}
    for name, (workers, engine) in WORKERS.items():
        known[name] = lambda shards, w=workers, e=engine: ours(shards, w, e)  # type: ignore[misc]
    known |= {"Fabric": fabric, "Accelerate": accelerate}
    return {name: known[name] for name in names}


def serve(name: str, shards: int) -> None:
    """Make as many updates as each line of standard input says, and print the seconds."""
    torch.set_num_threads(1)
    updates = contenders([name])[name](shards)
    next(updates)  # worker processes run this script up to here, and have no standard input
    print("ready", flush=True)
    for line in sys.stdin:
        begun = time.perf_counter()
        for _ in range(int(line)):
            next(updates)
        print(f"took {time.perf_counter() - begun}", flush=True)
    close = getattr(updates, "close", None)
    if close is not None:
        close()


def main() -> None:
    """Run the rounds and print the table."""
    global WIDTH
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--only", nargs="*", help="of the contenders, beside the plain loop")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--shards", type=int, nargs="*", default=SHARDS)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--base", type=Path, help="a checkout to compare with")
    told = parser.parse_args()
    WIDTH = told.width
    if told.serve:
        serve(told.serve, told.shards[0])
        return
    names = ["plain loop", *WORKERS]
    names += [n for n, module in PEERS.items() if told.peers and find_spec(module)]
    if told.only is not None:
        names = ["plain loop", *(name for name in names if name in told.only)]
    code: dict[str, tuple[str, Path | None]] = {name: (name, None) for name in names}
    compared = [name for name in names if name in WORKERS and told.base is not None]
    code |= {f"{name}, {base}": (name, told.base) for name in compared for base in BASES}
    found: dict[str, dict[int, float]] = {name: {} for name in code}
    ratios: dict[str, dict[int, float]] = {}
    for shards in told.shards:
        words = (__file__, "--width", str(WIDTH), "--shards", str(shards), "--serve")
        children = {key: Child(*words, name, tree=tree) for key, (name, tree) in code.items()}
        times: dict[str, list[float]] = {name: [] for name in code}
        for round_number in range(told.rounds + 1):
            for name, child in children.items():
                (took_s,) = child.took_s(told.updates)
                if round_number:  # the first one warms up
                    times[name].append(took_s / told.updates * 1e3)
        for name, child in children.items():
            found[name][shards] = statistics.median(times[name])
            child.close()
        for name in compared:
            now, base, again = (times[key] for key in (name, *(f"{name}, {b}" for b in BASES)))
            for label, of in (("now", now), ("base", again)):
                ratio = statistics.median(a / b for a, b in zip(of, base, strict=True))
                ratios.setdefault(f"{name}, {label} / base", {})[shards] = ratio
    print("| ms per update | " + " | ".join(f"V = {v}" for v in told.shards) + " |")
    print("|---|" + "---|" * len(told.shards))
    bound = {v: found["plain loop"][v] + 0.15 + 0.05 * v for v in told.shards}
    for name, by_shards in [*found.items(), ("bound for one worker", bound), *ratios.items()]:
        print(f"| {name} | " + " | ".join(f"{ms:.3f}" for ms in by_shards.values()) + " |")
    if told.json:
        told.json.write_text(json.dumps(found | {"bound": bound} | ratios, indent=1))


if __name__ == "__main__":
    main()
