"""Updates per second of async on a Ray cluster, beside a parameter server written with Ray.

    python benchmarks/ray_asynchronous.py [--rounds 3] [--steps 100] [--rows 64] [--json FILE]

The seed network, 64 rows per update, Nesterov SGD, two workers of one intra-op thread. The other
parameter server is made as Ray's documentation makes one: an actor that has the model, takes
gradients and returns weights; an actor per worker that takes weights and returns gradients; and a
loop that waits for whichever is ready. "here": workers are on the node of coordinator or server;
"there": on another of this machine, which objects reach as they reach another machine.

"sync" has four shards per worker and update. A worker waits between two of them for its next order,
unless it was begun before it came; "stalled" is how long, over how long shards take, by the median.

Contenders run in turns, each in fresh processes. "first" is from the start of the process to the
first update: on a cluster that is there, and, "local", with one that is started for the run.
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
from contextlib import suppress
from pathlib import Path

import numpy as np
import ray
import torch
from asynchronous import Stalls
from ray.cluster_utils import Cluster
from seed_network import Net, data, loss, sgd
from torch.utils.data import TensorDataset

import quorate
from quorate.engines.processes.wire import Wire
from quorate.engines.processes.worker import here

WORKERS, WARM_UP = 2, 20
STORE_BYTES = 400 << 20
CONTENDERS = ("quorate", "server", "sync")
PLACES = ("here", "there")


# --- quorate --------------------------------------------------------------------------------------


def contend(options: argparse.Namespace, *, is_async: bool) -> dict[str, float]:
    """One run; in a worker process this function does not come back."""
    if (worker := here()) is not None:
        stalls = Stalls(options.folder, worker.number)
        Wire.receive = lambda wire: stalls.receive(wire)  # type: ignore[method-assign]
    shards = WORKERS if is_async else 4 * WORKERS
    trainer = quorate.Trainer(
        Net,
        loss,
        optimizer=sgd,
        batch_size=shards * options.rows,
        shards=shards,
        workers=quorate.Workers(
            WORKERS,
            engine="ray",
            address=options.address,
            worker_resources="CPU=1,worker=1" if options.address else "CPU=1",
        ),
        update="async" if is_async else "sync",
    )
    steps = options.steps if is_async else options.steps // 4
    begun, first_s = 0.0, 0.0
    for report in trainer.updates(TensorDataset(*data()), steps=WARM_UP + steps):
        if report.global_step == 1:
            first_s = time.monotonic() - options.begun
        if report.global_step == WARM_UP:
            begun = time.perf_counter()
    found = {"updates/s": steps / (time.perf_counter() - begun), "first_s": first_s}
    files = [json.loads(path.read_text()) for path in options.folder.iterdir()]
    waits, shards_s = ([v for f in files for v in f[key]] for key in ("waits_s", "shards_s"))
    # Of sync every fourth wait is that for the update: less than half of them.
    found["wait_ms"] = 1e3 * statistics.median(waits)
    return found | {"shard_ms": 1e3 * statistics.median(shards_s)}


# --- a parameter server written with Ray ----------------------------------------------------------


class Model(Net):
    """The network, with what such servers add to it."""

    def weights(self) -> dict[str, torch.Tensor]:
        """All values by their names."""
        return {name: value.cpu() for name, value in self.state_dict().items()}

    def gradients(self) -> list[np.ndarray]:
        """The newest ones."""
        return [parameter.grad.cpu().numpy() for parameter in self.parameters()]


class Server:
    """Has the model."""

    def __init__(self) -> None:
        self._model = Model()
        self._optimizer = sgd(self._model.parameters())

    def weights(self) -> dict[str, torch.Tensor]:
        """As they are."""
        return self._model.weights()

    def apply(self, *gradients: list[np.ndarray]) -> dict[str, torch.Tensor]:
        """Make an update; return the weights."""
        self._optimizer.zero_grad()
        for parameter, *values in zip(self._model.parameters(), *gradients, strict=True):
            parameter.grad = torch.from_numpy(np.stack(values).sum(axis=0))
        self._optimizer.step()
        return self._model.weights()


class Computer:
    """A worker."""

    def __init__(self, number: int, rows: int) -> None:
        self._model = Model()
        images, labels = data()
        own = TensorDataset(images[number::WORKERS], labels[number::WORKERS])
        self._loader = torch.utils.data.DataLoader(own, rows, shuffle=True)
        self._batches = iter(self._loader)

    def compute(self, weights: dict[str, torch.Tensor]) -> list[np.ndarray]:
        """Return the gradients of the next batch."""
        self._model.load_state_dict(weights)
        if (batch := next(self._batches, None)) is None:
            self._batches = iter(self._loader)
            batch = next(self._batches)
        self._model.zero_grad()
        loss(self._model, batch)["loss"].backward()
        return self._model.gradients()


def server(options: argparse.Namespace) -> dict[str, float]:
    """One run of it."""
    ray.init(options.address, log_to_driver=False)
    own = ray.remote(num_cpus=1, resources={"server": 1})(Server).remote()
    others = ray.remote(num_cpus=1, resources={"worker": 1})(Computer)
    workers = [others.remote(number, options.rows) for number in range(WORKERS)]
    weights = own.weights.remote()
    computing = {worker.compute.remote(weights): worker for worker in workers}
    begun, first_s = 0.0, 0.0
    for update in range(WARM_UP + options.steps):
        (ready,), _ = ray.wait(list(computing))
        worker = computing.pop(ready)
        weights = own.apply.remote(ready)
        computing[worker.compute.remote(weights)] = worker
        if update == 0:
            ray.wait([weights], fetch_local=False)
            first_s = time.monotonic() - options.begun
        if update == WARM_UP - 1:
            begun = time.perf_counter()
    found: dict[str, torch.Tensor] = ray.get(weights)  # raises what was raised on the way
    assert all(values.isfinite().all() for values in found.values())
    return {"updates/s": options.steps / (time.perf_counter() - begun), "first_s": first_s}


# --- both -----------------------------------------------------------------------------------------


def cluster_of(place: str) -> Cluster:
    """Return a cluster that has its workers at a place."""
    cluster = Cluster()
    own, workers = {"server": 1}, {"worker": WORKERS}
    if place == "here":
        resources = {**own, **workers}
        cluster.add_node(num_cpus=WORKERS + 1, resources=resources, object_store_memory=STORE_BYTES)
    else:
        cluster.add_node(num_cpus=1, resources=own, object_store_memory=STORE_BYTES)
        cluster.add_node(num_cpus=WORKERS, resources=workers, object_store_memory=STORE_BYTES)
    return cluster


def one(contender: str, address: str | None, options: argparse.Namespace) -> dict[str, float]:
    """One run in processes of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--contender", contender, "--folder", folder]
        command += ["--steps", str(options.steps), "--rows", str(options.rows)]
        command += ["--begun", str(time.monotonic())]
        command += [] if address is None else ["--address", address]
        ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode:
        sys.exit(ended.stdout + ended.stderr)
    found: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Run the rounds and print medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100, help="updates, or a quarter for sync")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--begun", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        if options.contender == "server":
            found = server(options)
        else:
            found = contend(options, is_async=options.contender == "quorate")
        print(json.dumps(found))
        return
    if "RAY_AUTH_TOKEN" not in os.environ:  # Ray reads it as it is imported
        env = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}
        # Actors import the network, and have none of this script's own paths.
        own = Path(__file__).resolve().parent
        paths = [str(own), str(own.parent / "examples"), os.environ.get("PYTHONPATH")]
        env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **env})
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}")
    results: dict[str, list[dict[str, float]]] = {}
    for place in PLACES:
        cluster = cluster_of(place)
        try:
            for _ in range(options.rounds):
                for contender in CONTENDERS:
                    name = f"{contender} {place}"
                    results.setdefault(name, []).append(one(contender, cluster.address, options))
        finally:
            with suppress(Exception):
                cluster.shutdown()
    results["quorate local"] = [one("quorate", None, options) for _ in range(options.rounds)]
    for name, found in results.items():
        middle = {key: statistics.median(each[key] for each in found) for key in found[0]}
        text = f"{name:14} {middle['updates/s']:6.1f} updates/s, first {middle['first_s']:.1f} s"
        if "wait_ms" in middle:
            stalled = middle["wait_ms"] / middle["shard_ms"]
            text += f"; shard {middle['shard_ms']:.1f} ms, stalled {middle['wait_ms']:.2f}"
            text += f" ms or {stalled:.1%} of it"
        print(text)
    for place in PLACES:
        pairs = zip(results[f"quorate {place}"], results[f"server {place}"], strict=True)
        ratio = statistics.median(ours["updates/s"] / theirs["updates/s"] for ours, theirs in pairs)
        print(f"async {place}, quorate / server: {ratio:.2f}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
