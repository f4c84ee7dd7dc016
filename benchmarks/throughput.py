"""Examples per second of the seed network: by hand, with quorate, with torch DDP over gloo.

    python benchmarks/throughput.py [--rounds 7] [--steps 60] [--json FILE]

64 rows per worker, fp32, Nesterov SGD, one intra-op thread per worker. Each contender runs in a
fresh process; rounds are interleaved, so that a drift of the machine hits all alike. Printed are
medians over the rounds, and medians of the ratios within a round. "2 alone" are two processes side
by side that know nothing of each other: what the machine gives without any communication.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from fashion_mnist import Net, loss

import quorate

ROWS, PER_WORKER, WARM_UP = 12_800, 64, 15


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Random images and labels of Fashion-MNIST's shapes and dtypes."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (ROWS, 1, 28, 28), dtype=torch.uint8, generator=generator)
    return images, torch.randint(0, 10, (ROWS,), generator=generator)


def sgd(params: object, **options: bool) -> torch.optim.Optimizer:
    """The optimizer of all contenders."""
    return torch.optim.SGD(params, lr=0.01, momentum=0.9, nesterov=True, **options)  # type: ignore[arg-type]


def timed(
    step: Callable[[], None],
    rows: int,
    steps: int,
    ready: Callable[[], object] = int,
    done: Callable[[], object] = int,
) -> float:
    """Examples per second of ``steps`` steps, after a warm-up and when ``ready`` returns.

    ``done`` waits for what the steps have left to a device.
    """
    for _ in range(WARM_UP):
        step()
    ready()
    begun = time.perf_counter()
    for _ in range(steps):
        step()
    done()
    return rows * steps / (time.perf_counter() - begun)


def by_hand(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int = 0, ranks: int = 1
) -> Callable[[], None]:
    """The loop that people write: one step of it."""
    images, labels = data()

    def batches() -> Iterator[torch.Tensor]:
        while True:
            order = torch.randperm(ROWS)[rank::ranks]
            yield from order.split(PER_WORKER)[: len(order) // PER_WORKER]

    each = batches()

    def step() -> None:
        rows = next(each)
        logits = model(images[rows])
        optimizer.zero_grad()
        value = F.cross_entropy(logits, labels[rows])
        value.backward()
        optimizer.step()
        value.item()

    return step


def hand(steps: int) -> float:
    """A hand-written loop on one device."""
    model = Net()
    return timed(by_hand(model, sgd(model.parameters())), PER_WORKER, steps)


def hand_tuned(steps: int) -> float:
    """The same with channels_last and a fused optimizer, as an expert would write it."""
    model = Net().to(memory_format=torch.channels_last)
    return timed(by_hand(model, sgd(model.parameters(), fused=True)), PER_WORKER, steps)


def quorate_on(
    engine: str,
    workers: int,
    steps: int,
    ready: Callable[[], object] = int,
    precision: str = "fp32",
    exchange: str = "ordered",
) -> float:
    """Quorate, 64 rows per shard, one shard per worker."""
    trainer = quorate.Trainer(
        Net,
        loss,
        optimizer=sgd,
        batch_size=PER_WORKER * workers,
        shards=workers,
        devices="cpu",
        workers=quorate.Workers(workers, engine=engine, exchange=exchange),
        precision=precision,
    )
    updates = trainer.updates(TensorDataset(*data()), steps=WARM_UP + steps)
    try:
        return timed(lambda: void(next(updates).loss), PER_WORKER * workers, steps, ready)
    finally:
        updates.close()


def void(_: object) -> None:
    """Nothing."""


def alone(steps: int, *, by: str) -> float:
    """Two processes side by side, each for itself; their speeds together."""
    import torch.multiprocessing as mp

    context = mp.get_context("spawn")
    results, barrier = context.SimpleQueue(), context.Barrier(2)
    mp.spawn(_alone, (steps, by, barrier, results), nprocs=2)
    return results.get() + results.get()


def _alone(_rank: int, steps: int, by: str, barrier: Any, results: Any) -> None:
    torch.set_num_threads(1)
    if by == "quorate":
        results.put(quorate_on("towers", 1, steps, barrier.wait))
        return
    model = Net().to(memory_format=torch.channels_last)
    step = by_hand(model, sgd(model.parameters(), fused=True))
    results.put(timed(step, PER_WORKER, steps, barrier.wait))


def ddp(steps: int, *, tuned: bool) -> float:
    """Torch DDP over gloo, two processes of one thread each."""
    import torch.multiprocessing as mp

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_rank, (port, steps, tuned, results), nprocs=2)
    return results.get()


def _rank(rank: int, port: int, steps: int, tuned: bool, results: object) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    torch.manual_seed(0)
    model = Net()
    if tuned:
        model = model.to(memory_format=torch.channels_last)
    wrapped = nn.parallel.DistributedDataParallel(model)
    step = by_hand(
        wrapped, sgd(wrapped.parameters(), **({"fused": True} if tuned else {})), rank, 2
    )
    speed = timed(step, 2 * PER_WORKER, steps)
    if rank == 0:
        results.put(speed)  # type: ignore[attr-defined]
    dist.destroy_process_group()


CONTENDERS: dict[str, Callable[[int], float]] = {
    "hand": hand,
    "hand, tuned": hand_tuned,
    "quorate, 1 tower": lambda steps: quorate_on("towers", 1, steps),
    "DDP, 2 ranks": lambda steps: ddp(steps, tuned=False),
    "DDP, 2 ranks, tuned": lambda steps: ddp(steps, tuned=True),
    "quorate, 2 towers": lambda steps: quorate_on("towers", 2, steps),
    "quorate, 2 processes": lambda steps: quorate_on("processes", 2, steps),
    "quorate, 2 ranks": lambda steps: quorate_on("collective", 2, steps),
    "quorate, 2 ranks, native": lambda steps: quorate_on("collective", 2, steps, exchange="native"),
    "quorate, 2 alone": lambda steps: alone(steps, by="quorate"),
    "hand, tuned, 2 alone": lambda steps: alone(steps, by="hand"),
}
RATIOS = [
    ("quorate, 1 tower", "hand"),
    ("quorate, 1 tower", "hand, tuned"),
    ("quorate, 2 towers", "DDP, 2 ranks"),
    ("quorate, 2 towers", "DDP, 2 ranks, tuned"),
    ("quorate, 2 towers", "quorate, 1 tower"),
    ("quorate, 2 processes", "DDP, 2 ranks"),
    ("quorate, 2 processes", "DDP, 2 ranks, tuned"),
    ("quorate, 2 ranks", "DDP, 2 ranks"),
    ("quorate, 2 ranks", "DDP, 2 ranks, tuned"),
    ("quorate, 2 ranks, native", "DDP, 2 ranks"),
    ("quorate, 2 ranks", "quorate, 2 ranks, native"),
    ("quorate, 2 processes", "quorate, 2 alone"),
    ("quorate, 2 processes", "hand, tuned, 2 alone"),
    ("quorate, 2 towers", "quorate, 2 alone"),
]


def main() -> None:
    """Run the rounds and print medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", help="contenders whose names contain this")
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        print(json.dumps(CONTENDERS[options.contender](options.steps)))
        return
    chosen = [name for name in CONTENDERS if (options.only or "") in name]
    speeds: dict[str, list[float]] = {name: [] for name in chosen}
    for _ in range(options.rounds):
        for name, found in speeds.items():
            command = [sys.executable, __file__, "--contender", name, "--steps", str(options.steps)]
            ended = subprocess.run(command, check=True, capture_output=True, text=True)
            found.append(json.loads(ended.stdout.splitlines()[-1]))
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}")
    for name, found in speeds.items():
        spread = f"{min(found):,.0f} to {max(found):,.0f}"
        print(f"{name:22} {statistics.median(found):7,.0f} examples/s   ({spread})")
    ratios = {}
    for one, other in RATIOS:
        if not {one, other} <= speeds.keys():
            continue
        pairs = zip(speeds[one], speeds[other], strict=True)
        ratios[f"{one} / {other}"] = ratio = statistics.median(a / b for a, b in pairs)
        print(f"{one} / {other}: {ratio:.3f}")
    if options.json:
        record = {"examples_per_s": speeds, "ratios": ratios, "torch": torch.__version__}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
