"""How long two workers take to exchange gradients: shared memory against gloo's all-reduce.

    python benchmarks/exchange.py [--rounds 7] [--mib 12.6] [--json FILE]

Each worker has a vector of float32; in the end everybody who needs it can read the mean. gloo:
``all_reduce`` and one division, in both ranks. quorate: both workers say that their slot is
written, the coordinator adds and divides, and tells them to go on; what is timed is the
coordinator's wire, arena and update, from the call to compute to the mean. "with the copy" adds the
copy of the vector into the slot, which in gloo's case DDP makes into its buckets.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import selectors
import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from quorate.coordination.tree import tree_sum
from quorate.engines.processes.wire import Wire
from quorate.machine.shared_memory import Segment
from quorate.replica.flat import Layout

REPEATS = 60


def median_ms(exchange: Callable[[], object]) -> float:
    """The median time of an exchange, after a warm-up."""
    times = []
    for number in range(REPEATS + 10):
        begun = time.perf_counter()
        exchange()
        if number >= 10:
            times.append(time.perf_counter() - begun)
    return 1000 * statistics.median(times)


def _gloo(rank: int, port: int, elements: int, results: Any) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    vector = torch.ones(elements)

    def exchange() -> None:
        dist.all_reduce(vector)
        vector.div_(2.0)

    found = median_ms(exchange)
    if rank == 0:
        results.put(found)
    dist.destroy_process_group()


def gloo(elements: int) -> float:
    """Torch's own: two ranks over loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    ranks = [
        context.Process(target=_gloo, args=(rank, port, elements, results)) for rank in range(2)
    ]
    for each in ranks:
        each.start()
    found: float = results.get()
    for each in ranks:
        each.join()
    return found


def _worker(wire: Wire, segment: Segment, layout: Layout, number: int, copies: bool) -> None:
    torch.set_num_threads(1)
    slot = layout.over(segment, number * segment.nbytes // 2)
    gradient = layout.new(torch.device("cpu"))
    while wire.receive() is not None:
        if copies:
            slot.copy_(gradient)
        wire.send({"kind": "done"})


def shared(elements: int, *, copies: bool) -> float:
    """quorate's: two workers and the coordinator."""
    torch.set_num_threads(1)
    layout = Layout([("gradient", torch.empty(elements, device="meta"))])
    segment = Segment(2 * layout.nbytes)
    slots = [layout.over(segment, number * layout.nbytes) for number in range(2)]
    context = multiprocessing.get_context("fork")  # they share what is mapped here
    pairs = [Wire.pair() for _ in range(2)]
    workers = [
        context.Process(target=_worker, args=(pair[1], segment, layout, number, copies))
        for number, pair in enumerate(pairs)
    ]
    for each in workers:
        each.start()
    selector = selectors.DefaultSelector()
    for ours, _ in pairs:
        selector.register(ours.socket, selectors.EVENT_READ, ours)

    def exchange() -> None:
        for ours, _ in pairs:
            ours.send({"kind": "compute", "job": 1, "step": 7, "shard": 3, "slot": 2})
        answers = 0
        while answers < 2:
            for key, _ in selector.select():
                answers += len(key.data.arrived())
        parts = [((0, number), slot) for number, slot in enumerate(slots)]
        total = tree_sum(parts, 2, lambda left, right: left.add_(right))
        for vector in total.vectors:
            vector.div_(2.0)

    found = median_ms(exchange)
    selector.close()
    for each in workers:
        each.kill()
        each.join()
    for pair in pairs:
        for wire in pair:
            wire.close()
    return found


def main() -> None:
    """Run the rounds and print medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mib", type=float, default=13.2e6 / 2**20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    elements = round(options.mib * 2**20 / 4)
    times: dict[str, list[float]] = {"gloo": [], "quorate": [], "quorate, with the copy": []}
    for _ in range(options.rounds):
        times["gloo"].append(gloo(elements))
        times["quorate"].append(shared(elements, copies=False))
        times["quorate, with the copy"].append(shared(elements, copies=True))
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}")
    print(f"{4 * elements / 1e6:.1f} MB between two workers")
    for name, found in times.items():
        pairs = zip(times["gloo"], found, strict=True)
        ratio = statistics.median(theirs / ours for theirs, ours in pairs)
        spread = f"{min(found):.2f} to {max(found):.2f}"
        print(f"{name:24} {statistics.median(found):6.2f} ms ({spread}), gloo / this: {ratio:.1f}")
    if options.json:
        options.json.write_text(json.dumps(times, indent=1) + "\n")


if __name__ == "__main__":
    main()
