"""What it costs to have a worker process compute a shard, beside the shard.

    python benchmarks/signals.py [--workers 2] [--shards 5000]

Shards of nothing: the time from ``Compute`` to ``Done``, with one worker, and with all of them at
once, each a shard. Then an update of a perceptron of 32, 64 and 4, 64 rows, Adam, a shard on each
worker, beside the arithmetic of one such shard in a plain loop. Microseconds; and how long each
process ran on a core meanwhile, which other programs disturb less.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import quorate
from quorate.coordination.protocol import Compute, Discard, Done, Joined
from quorate.engines import Channel, Transport, WrappedTransport
from quorate.engines.job import Job, Training
from quorate.replica.shard_sum import ShardSum
from quorate.training.observer import observing
from quorate.training.state import State

ROWS, BATCH = 12_800, 64
WARM_UP = 300


class Nothing(WrappedTransport):
    """Has its workers compute shards of nothing, and ends the script.

    Args:
        shards: how many, of each worker.
    """

    def __init__(self, inner: Transport, shards: int) -> None:
        super().__init__(inner)
        self._shards = shards

    def open(self, job: Job) -> Channel:
        """Take the training loop's job for it."""
        channel = self._inner.open(job)
        workers = range(len(self._inner.status()))
        joined: set[int] = set()
        while len(joined) < len(workers):
            event = channel.receive(None)
            joined |= {event.worker} if isinstance(event, Joined) else set()
        for some in (workers[:1], workers):
            self._exchange(channel, some, WARM_UP)
            pids = [row.pid for row in self.status()][: len(some)]
            began_ns, before_ns = time.process_time_ns(), [on_core_ns(pid) for pid in pids]
            took_ns = self._exchange(channel, some, self._shards)
            own_us = (time.process_time_ns() - began_ns) / self._shards / 1e3
            each = [
                (on_core_ns(pid) - ns) / self._shards / 1e3
                for pid, ns in zip(pids, before_ns, strict=True)
            ]
            print(
                f"a shard of nothing on each of {len(some)}: {said(took_ns)}; on a core: "
                f"coordinator {own_us:.0f} us, workers {', '.join(f'{us:.0f}' for us in each)} us"
            )
        raise SystemExit(0)

    def _exchange(self, channel: Channel, workers: Sequence[int], shards: int) -> list[int]:
        """Have each worker compute so many, all at once; return how long each took together."""
        took_ns = []
        for _ in range(shards):
            began_ns = time.perf_counter_ns()
            for worker in workers:
                channel.send(Compute(worker, 0, worker, "", (worker, len(workers))))
            waiting = set(workers)
            while waiting:
                event = channel.receive(None)
                assert isinstance(event, Done), event
                waiting.remove(event.worker)
            took_ns.append(time.perf_counter_ns() - began_ns)
            for worker in workers:
                channel.send(Discard(worker, 0, worker))
        return took_ns


def on_core_ns(pid: int | None) -> int:
    """Return how long the threads of a process ran on a core."""
    sheets = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(sheet.read_text().split()[0]) for sheet in sheets)


def said(took_ns: Sequence[int]) -> str:
    """Return times in words."""
    ordered = sorted(took_ns)
    tenth, median, late = (ordered[int(len(ordered) * q)] / 1e3 for q in (0.1, 0.5, 0.99))
    return f"median {median:.0f} us (p10 {tenth:.0f}, p99 {late:.0f})"


def net() -> nn.Module:
    """The perceptron."""
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Its loss."""
    return F.cross_entropy(model(batch[0]), batch[1])


def adam(params: object) -> torch.optim.Optimizer:
    """The optimizer."""
    return torch.optim.Adam(params, lr=1e-3)  # type: ignore[arg-type]


def computed_nothing(*_: Any, **__: Any) -> ShardSum:
    """Stand in for ``Job.compute``, in workers as in the coordinator."""
    return ShardSum(1.0, {"loss": 0.0}, missing=frozenset())


def shard_by_hand(data: TensorDataset, workers: int, shards: int) -> list[int]:
    """Return how long forward and backward of so many shards took."""
    model, took_ns = net(), []
    rows = [tensor[: BATCH // workers] for tensor in data.tensors]
    for _ in range(shards):
        began_ns = time.perf_counter_ns()
        loss(model, rows).backward()  # type: ignore[no-untyped-call]
        took_ns.append(time.perf_counter_ns() - began_ns)
        model.zero_grad()
    return took_ns


def main() -> None:
    """Print both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--shards", type=int, default=5000)
    parser.add_argument("--of", choices=("nothing", "perceptron"))
    asked = parser.parse_args()
    if asked.of is None:  # a script has one training loop on worker processes
        import subprocess
        import sys

        for what in ("nothing", "perceptron"):
            subprocess.run([sys.executable, *sys.argv, "--of", what], check=True)
        return
    torch.set_num_threads(1)
    torch.manual_seed(0)  # workers run this too, and have the same rows
    data = TensorDataset(torch.randn(ROWS, 32), torch.randint(0, 4, (ROWS,)))
    trainer = quorate.Trainer(
        net,
        loss,
        optimizer=adam,
        batch_size=BATCH,
        shards=asked.workers,
        devices="cpu",
        workers=quorate.Workers(asked.workers, engine="processes"),
    )
    if asked.of == "nothing":
        Training.compute = computed_nothing  # type: ignore[method-assign]

        def observe(inner: Transport, _: State, __: Mapping[str, Any]) -> Transport:
            return Nothing(inner, asked.shards)

        with observing(observe):
            trainer.fit(data, epochs=1)
    updates = trainer.updates(data, steps=10**9)
    for _ in range(WARM_UP):
        next(updates)
    pids = [row.pid for row in trainer.workers]
    began_ns, before_ns = time.process_time_ns(), [on_core_ns(pid) for pid in pids]
    took_ns = []
    for _ in range(asked.shards):
        at_ns = time.perf_counter_ns()
        next(updates)
        took_ns.append(time.perf_counter_ns() - at_ns)
    own_us = (time.process_time_ns() - began_ns) / asked.shards / 1e3
    each = [
        (on_core_ns(pid) - ns) / asked.shards / 1e3 for pid, ns in zip(pids, before_ns, strict=True)
    ]
    updates.close()
    print(
        f"an update, a shard on each of {asked.workers}: {said(took_ns)}; on a core: "
        f"coordinator {own_us:.0f} us, workers {', '.join(f'{us:.0f}' for us in each)} us"
    )
    print(f"a shard by hand: {said(shard_by_hand(data, asked.workers, asked.shards))}")


if __name__ == "__main__":
    main()
