"""Updates per second over links of 1 Gb/s: a coordinator with all parameters, and servers.

    sudo python benchmarks/ray_servers.py [--rounds 2] [--steps 12] [--mbit 1000] [--servers 0 1 2]

Three hosts that are network namespaces: the coordinator's, and two with one worker each; servers
are on the workers' hosts. A perceptron of so many millions of parameters, fp32, Adam, one shard of
a few rows per worker, so that links are what takes time. 0 servers: the coordinator has all. Bytes
are what the interfaces count, headers included. Rounds are interleaved. --mbit 0: no bound on the
links. It takes root, on Linux.
"""

from __future__ import annotations

import argparse
import json
import secrets
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import quorate

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))  # for support

WIDTH = 2000
WARM = 3  # updates before anything is measured
LIMIT_S = 400.0
START_S = 20  # that nodes take to be there
HEAD = "10.231.7.1:6379"
# Ray keeps sockets and sessions under fixed names: each host has a folder of its own for them.
ALONE = "mkdir -p /tmp/ray && mount -t tmpfs tmpfs /tmp/ray && mount -t tmpfs tmpfs /dev/shm && "


def train(millions: float, steps: int, shard_s: float, folder: Path) -> None:
    """Train, and note when updates were made: from beside, as callbacks want all parameters."""

    def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        time.sleep(shard_s)
        return model(batch[0]).square().mean()

    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(max(1, round(millions * 1e6 / WIDTH**2)))]
    trainer = quorate.Trainer(
        nn.Sequential(*layers, nn.Linear(WIDTH, 1)),
        loss,
        optimizer=lambda params: torch.optim.Adam(params, lr=1e-5),
        batch_size=8,
        shards=2,
    )
    made: dict[int, float] = {}

    def look() -> None:
        while WARM + steps not in made:
            if (step := trainer.global_step) not in made:
                made[step] = time.monotonic()
                if step in (WARM, WARM + steps):  # before the end brings all of it home
                    (folder / f"step-{step}").touch()
            time.sleep(0.002)

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    trainer.fit(TensorDataset(torch.randn(64, WIDTH)), steps=WARM + steps)
    looking.join()
    seconds = (made[WARM + steps] - made[WARM]) / steps
    (folder / "seconds").write_text(json.dumps(seconds))


# --- the coordinator's host -----------------------------------------------------------------------


def run_all(folder: Path, names: Sequence[str], options: Sequence[str]) -> None:
    """Run one training after the other on the cluster; a folder each says how it went."""
    for name in names:
        own = folder / name
        own.mkdir()
        servers = name.partition("-")[0]
        words = [sys.executable, "-m", "quorate", "run", "--engine", "ray", "--workers", "2"]
        words += ["--address", HEAD, *(() if servers == "0" else ("--servers", servers))]
        with (own / "log").open("w") as log:
            train = [__file__, "train", "--folder", str(own), *options]
            subprocess.run([*words, *train], stdout=log, stderr=log, check=False)
        (own / "ended").touch()


# --- outside --------------------------------------------------------------------------------------


def measured(arguments: argparse.Namespace) -> dict[str, list[tuple[float, list[float]]]]:
    """Return by number of servers, for each round: seconds per update, and MB sent by each host."""
    from support.hosts import hosts

    found: dict[str, list[tuple[float, list[float]]]] = {}
    servers = [str(number) for number in arguments.servers]
    names = [f"{s}-{n}" for n in range(arguments.rounds) for s in servers]
    env = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}
    ray = f"{Path(sys.executable).with_name('ray')} start --disable-usage-stats"
    store = f"--object-store-memory {1 << 30}"
    options = _options(arguments)
    with tempfile.TemporaryDirectory() as name, hosts(3) as made:
        folder, (head, *others) = Path(name), made
        begin = f"{ray} --head --port 6379 --include-dashboard false --num-cpus 0 {store}"
        begin += f" --node-ip-address {head.address} && sleep {START_S} && exec "
        runs = [sys.executable, __file__, "runs", "--folder", name, *options, "--names", *names]
        with (folder / "head").open("w") as log:
            head.start(["sh", "-c", ALONE + begin + " ".join(runs)], env, log)
            time.sleep(START_S / 2)
            for host in others:
                join = f"exec {ray} --address {HEAD} --num-cpus 1 {store} --block"
                join += f" --node-ip-address {host.address}"
                host.start(["sh", "-c", ALONE + join], env, log)
            for host in made if arguments.mbit else ():
                host.slow(arguments.mbit)
            for each in names:
                counted = [
                    _when(folder / each, step, made) for step in (WARM, WARM + arguments.steps)
                ]
                _await(folder / each / "ended", folder / each)
                print((folder / each / "log").read_text(), file=sys.stderr, flush=True)
                seconds = json.loads((folder / each / "seconds").read_text())
                sent = [
                    (after - before) / arguments.steps / 1e6
                    for before, after in zip(*counted, strict=True)
                ]
                found.setdefault(each.partition("-")[0], []).append((seconds, sent))
    return found


def _options(arguments: argparse.Namespace) -> list[str]:
    """Return what each training is told."""
    named = {"millions": arguments.millions, "steps": arguments.steps, "shard-s": arguments.shard_s}
    return [word for name, value in named.items() for word in (f"--{name}", str(value))]


def _when(folder: Path, step: int, made: Sequence[Any]) -> list[int]:
    """Return what each host has sent when a step is made."""
    _await(folder / f"step-{step}", folder)
    return [host.carried()[0] for host in made]


def _await(file: Path, folder: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not file.exists():
        if time.monotonic() > deadline or (folder / "ended").exists():
            said = [f for f in (folder / "log", folder.parent / "head") if f.exists()]
            raise SystemExit("\n".join(each.read_text()[-3000:] for each in said))
        time.sleep(0.01)


def main() -> None:
    """Print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", nargs="?", choices=("runs", "train"))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--mbit", type=int, default=1000)
    parser.add_argument("--millions", type=float, default=12.0)
    parser.add_argument("--shard-s", type=float, default=0.2)
    parser.add_argument("--servers", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--names", nargs="+")
    arguments = parser.parse_args()
    if arguments.what == "train":
        train(arguments.millions, arguments.steps, arguments.shard_s, arguments.folder)
        return
    if arguments.what == "runs":
        options = _options(arguments)
        run_all(arguments.folder, arguments.names, options)
        return
    from support.hosts import obstacle

    if (why := obstacle()) is not None:
        raise SystemExit(f"no hosts can be made here: {why}")
    print(f"{arguments.millions:g} M parameters, 2 workers, links of {arguments.mbit} Mb/s")
    print("servers  updates/s  against 0  MB sent per update by host a (coordinator), b, c")
    found = measured(arguments)
    first = statistics.median(seconds for seconds, _ in next(iter(found.values())))
    for servers, rounds in found.items():
        seconds = statistics.median(seconds for seconds, _ in rounds)
        sent = [statistics.median(column) for column in zip(*(s for _, s in rounds), strict=True)]
        listed = " ".join(f"{one:7.1f}" for one in sent)
        print(f"{servers:>7}  {1 / seconds:9.2f}  {first / seconds:9.2f}  {listed}")


if __name__ == "__main__":
    main()
