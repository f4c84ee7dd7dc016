"""What an update's exchange costs on a Ray cluster, beside what Ray itself costs for as many bytes.

    python benchmarks/ray_exchange.py [--mb 13.2 400] [--workers 1 2 4] [--rounds 3] [--json FILE]

Each worker gets all parameters and hands over as many bytes of gradients; it computes nothing, and
nothing is added, so that an update is pull and push alone: from the moment that parameters are
ready in the coordinator until all gradients are there. "pull" ends when the last worker begins.

Ray's own: a put of the parameters, a call to an actor per worker that takes them, and a call each
that returns as many bytes, which are got. "sum" has one after the other, "at once" all actors side
by side, as a training loop written with Ray would have them.

Places, all of this machine: "here" is the coordinator's own node, "there" another, "both" half of
the workers each: there those here, who compute nothing, take the others' shards over before these
have their parameters, which says little. Between two nodes of one machine Ray moves objects as
between two machines, over a network that has no bound.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from ray.cluster_utils import Cluster
from torch import nn
from torch.utils.data import TensorDataset

import quorate
from quorate.engines.job import Job
from quorate.engines.processes.transport import ProcessesChannel
from quorate.engines.processes.worker import here
from quorate.engines.ray.pool import NodeRelay
from quorate.replica.shard_sum import ShardSum

PLACES = ("here", "there", "both")
WARM_UP = 3


class Vector(nn.Module):
    """Parameters of so many bytes, in one vector."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(nbytes // 4))


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Something with a gradient for all of it."""
    return model.weight.mean() * batch[0].mean()


# --- quorate --------------------------------------------------------------------------------------


def contend(address: str, nbytes: int, workers: int, updates: int, folder: Path) -> dict[str, Any]:
    """One run; in a worker process this function does not come back."""
    ready, in_ = dict[int, float](), dict[int, float]()  # by step: parameters, all gradients
    moved = [0, 0]  # bytes: there and back
    if here() is not None:
        _compute_once(folder)
    else:
        _watch(ready, in_, moved)
    trainer = quorate.Trainer(
        lambda: Vector(nbytes),
        loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.0),
        batch_size=workers,
        shards=workers,
        workers=quorate.Workers(workers, engine="ray", address=address),
    )
    before = time.monotonic()
    first_s = 0.0
    for report in trainer.updates(TensorDataset(torch.ones(64, 1)), steps=updates):
        if report.global_step == 1:
            first_s = time.monotonic() - before
        if report.global_step == WARM_UP:
            moved[:] = 0, 0
    firsts: dict[tuple[int, int], float] = {}  # by step and shard: a late copy does not count
    for path in folder.iterdir():
        for line in path.read_text().splitlines():
            step, shard, at = line.split()
            key = int(step), int(shard)
            firsts[key] = min(firsts.get(key, float("inf")), float(at))
    begun = {t: max(firsts[t, shard] for shard in range(workers)) for t in range(updates)}
    steps = range(WARM_UP, updates)
    pull = [begun[t] - ready[t] for t in steps]
    both = [in_[t] - ready[t] for t in steps]
    return {
        "pull": statistics.median(pull),
        "exchange": statistics.median(both),
        "first": first_s,
        "MB there": moved[0] / len(steps) / 1e6,
        "MB back": moved[1] / len(steps) / 1e6,
    }


def _compute_once(folder: Path) -> None:
    """In a worker: have each shard after the first one cost nothing, and say when it began."""
    compute, known = Job.compute, dict[str, ShardSum]()
    file = (folder / str(os.getpid())).open("w", buffering=1)

    def quick(self: Job, replica: Any, stream: Any, feed: Any, task: Any, **rest: Any) -> ShardSum:
        file.write(f"{task.step} {task.shard} {time.monotonic()}\n")
        if "first" not in known:
            known["first"] = compute(self, replica, stream, feed, task, **rest)
        return known["first"]

    Job.compute = quick  # type: ignore[method-assign]


def _watch(ready: dict[int, float], in_: dict[int, float], moved: list[int]) -> None:
    """In the coordinator: note when parameters are ready, when gradients are in; count bytes."""
    collect, publish = ProcessesChannel.collect, ProcessesChannel.publish
    copy, put = NodeRelay._copy, ray.put

    def collecting(self: ProcessesChannel, step: int, *of: Any) -> Any:
        if self.number == 1:  # others check in between that workers agree
            in_[step] = time.monotonic()
        return collect(self, step, *of)

    def publishing(self: ProcessesChannel) -> None:
        publish(self)
        if self.number == 1:
            ready[max(in_) + 1] = time.monotonic()

    def copying(self: NodeRelay, values: Any, *place: Any) -> None:
        moved[1] += values.nbytes
        copy(self, values, *place)

    def putting(value: Any, **options: Any) -> Any:
        moved[0] += getattr(value, "nbytes", 0)
        return put(value, **options)

    ProcessesChannel.collect = collecting  # type: ignore[method-assign]
    ProcessesChannel.publish = publishing  # type: ignore[method-assign]
    ShardSum.add = lambda self, _: self  # type: ignore[method-assign]
    NodeRelay._copy = copying  # type: ignore[method-assign]
    ray.put = putting


# --- Ray ------------------------------------------------------------------------------------------


class Plain:
    """An actor as Ray's documentation has them."""

    def __init__(self, nbytes: int) -> None:
        self._own = np.ones(nbytes, np.uint8)

    def take(self, parameters: np.ndarray) -> int:
        """Get the parameters."""
        return parameters.nbytes

    def give(self) -> np.ndarray:
        """Hand over as many bytes."""
        return self._own

    def take_and_give(self, parameters: np.ndarray) -> np.ndarray:
        """Both, in one call."""
        assert parameters.nbytes == self._own.nbytes
        return self._own


def plain(address: str, nbytes: int, workers: int, repeats: int) -> dict[str, float]:
    """Ray's own costs in seconds, medians."""
    ray.init(address, log_to_driver=False)
    actor = ray.remote(num_cpus=1, scheduling_strategy="SPREAD")(Plain)
    actors = [actor.remote(nbytes) for _ in range(workers)]
    parameters = np.ones(nbytes, np.uint8)
    found: dict[str, list[float]] = {"put": [], "take": [], "give": [], "at once": []}

    def timed(name: str, what: Callable[[], Any]) -> Any:
        begun = time.perf_counter()
        result = what()
        found[name].append(time.perf_counter() - begun)
        return result

    def round_() -> None:
        ref = ray.put(parameters)
        for answer in [each.take_and_give.remote(ref) for each in actors]:
            ray.get(answer)

    def take(ref: Any) -> None:
        for each in actors:
            ray.get(each.take.remote(ref))

    for _ in range(repeats + WARM_UP):
        put = timed("put", lambda: ray.put(parameters))
        timed("take", partial(take, put))
        del put
        timed("give", lambda: [ray.get(each.give.remote()).nbytes for each in actors])
        timed("at once", round_)
    ray.shutdown()
    return {name: statistics.median(times[WARM_UP:]) for name, times in found.items()}


# --- both -----------------------------------------------------------------------------------------


def cluster_of(place: str, workers: int, nbytes: int) -> Cluster:
    """Return a cluster where workers can be at this place alone."""
    store = (2 * workers + 4) * nbytes + (200 << 20)
    here_, there = {"here": (workers, 0), "there": (0, workers)}.get(
        place, (workers - workers // 2, workers // 2)
    )
    cluster = Cluster()
    cluster.add_node(num_cpus=here_, object_store_memory=store)
    if there:
        cluster.add_node(num_cpus=there, object_store_memory=store)
    return cluster


def side_by_side(place: str, nbytes: int, workers: int, updates: int, rounds: int) -> list[Any]:
    """Return what each round found, of both."""
    results = []
    cluster = cluster_of(place, workers, nbytes)
    try:
        for _ in range(rounds):
            both: dict[str, Any] = {}
            for contender in ("quorate", "ray"):
                with tempfile.TemporaryDirectory() as folder:
                    words = ["--contender", contender, "--address", cluster.address]
                    words += ["--bytes", str(nbytes), "--workers", str(workers)]
                    words += ["--updates", str(updates), "--folder", folder]
                    command = [sys.executable, __file__, *words]
                    ended = subprocess.run(command, capture_output=True, text=True)
                    if ended.returncode:
                        sys.exit(ended.stdout + ended.stderr)
                both[contender] = json.loads(ended.stdout.splitlines()[-1])
            results.append(both)
    finally:
        with suppress(Exception):
            cluster.shutdown()
    return results


def main() -> None:
    """Run all rounds, and print medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=float, nargs="+", default=[13.2, 400.0])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--places", nargs="+", default=PLACES[:2], choices=PLACES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--bytes", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--updates", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        told = (options.address, options.bytes, options.workers[0], options.updates)
        one = contend(*told, options.folder) if options.contender == "quorate" else plain(*told)
        print(json.dumps(one))
        return
    if "RAY_AUTH_TOKEN" not in os.environ:  # Ray reads it as it is imported
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **token})
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, ms")
    kept = {}
    for mb in options.mb:
        for place in options.places:
            for workers in options.workers:
                if place == "both" and workers == 1:
                    continue
                updates = 60 if mb < 50 else 12
                told = (place, int(mb * 1e6) // 4 * 4, workers, updates)
                results = side_by_side(*told, options.rounds)
                kept[f"{mb} MB, {workers} {place}"] = results
                print(line(mb, workers, place, results), flush=True)
    if options.json:
        options.json.write_text(json.dumps(kept, indent=1) + "\n")


def line(mb: float, workers: int, place: str, results: list[Any]) -> str:
    """Return what was found in one place, in words."""

    def middle(of: Callable[[Any, Any], float]) -> float:
        return statistics.median(of(each["quorate"], each["ray"]) for each in results)

    def sum_of(r: Any) -> float:
        return r["put"] + r["take"] + r["give"]

    return (
        f"{mb:g} MB, {workers} {place:5}: pull {1e3 * middle(lambda q, _: q['pull']):.1f}, "
        f"pull and push {1e3 * middle(lambda q, _: q['exchange']):.1f} "
        f"({middle(lambda q, _: q['MB there']):.1f} MB into the store, "
        f"{middle(lambda q, _: q['MB back']):.1f} out of it); Ray's put "
        f"{1e3 * middle(lambda _, r: r['put']):.1f}, calls that take "
        f"{1e3 * middle(lambda _, r: r['take']):.1f}, that give "
        f"{1e3 * middle(lambda _, r: r['give']):.1f}, at once "
        f"{1e3 * middle(lambda _, r: r['at once']):.1f}; this / sum "
        f"{middle(lambda q, r: q['exchange'] / sum_of(r)):.2f}, this / at once "
        f"{middle(lambda q, r: q['exchange'] / r['at once']):.2f}"
    )


if __name__ == "__main__":
    main()
