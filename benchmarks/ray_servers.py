"""Updates per second over links of 1 Gb/s: a coordinator with all parameters, and servers.

    sudo python benchmarks/ray_servers.py [--rounds 2] [--steps 12] [--mbit 1000] [--servers 0 1 2]
        [--updates sync async bounded:4]

Three hosts that are network namespaces: the coordinator's, and two with one worker each; servers
are on the workers' hosts. A perceptron of so many millions of parameters, fp32, Adam, one shard of
a few rows per worker, so that links are what takes time. 0 servers: the coordinator has all. Bytes
are what the interfaces count, headers included. Rounds are interleaved. --mbit 0: no bound on the
links. It takes root, on Linux.

Under "async" and "bounded:K" each shard is an update: --steps of them are twice as many, of half
the rows. Every run is checked: the rows of all updates, and those that were dropped, are the rows
that were dealt, and no gradient is staler than the rule allows.
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
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import TensorDataset

import quorate
from quorate.coordination.rules import parse

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))  # for support

WIDTH = 2000
ROWS, SHARDS = 8, 2  # of a batch
WARM = 3  # batches before anything is measured
LIMIT_S = 400.0
START_S = 20  # that nodes take to be there
HEAD = "10.231.7.1:6379"
# Ray keeps sockets and sessions under fixed names: each host has a folder of its own for them.
ALONE = "mkdir -p /tmp/ray && mount -t tmpfs tmpfs /tmp/ray && mount -t tmpfs tmpfs /dev/shm && "


def updates_in(batches: int, update: str) -> int:
    """Return how many updates batches make."""
    return batches * (1 if update == "sync" else SHARDS)


def train(millions: float, first: int, last: int, shard_s: float, folder: Path) -> None:
    """Train, and note when updates were made: from beside, as callbacks want all parameters.

    Args:
        first: the update from which on time is measured.
        last: the last update.
    """

    def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        time.sleep(shard_s)
        return model(batch[0]).square().mean()

    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(max(1, round(millions * 1e6 / WIDTH**2)))]
    trainer = quorate.Trainer(
        nn.Sequential(*layers, nn.Linear(WIDTH, 1)),
        loss,
        optimizer=lambda params: torch.optim.Adam(params, lr=1e-5),
        batch_size=ROWS,
        shards=SHARDS,
        run_dir=folder / "run",
    )
    made: dict[int, float] = {}

    def look() -> None:
        while len(made) < 2:
            step = trainer.global_step
            for bound, name in ((first, "first"), (last, "last")):
                if step >= bound and bound not in made:  # before the end brings all of it home
                    made[bound] = time.monotonic()
                    (folder / name).touch()
            time.sleep(0.002)

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    trainer.fit(TensorDataset(torch.randn(64, WIDTH)), steps=last)
    looking.join()
    seconds = (made[last] - made[first]) / (last - first)
    (folder / "seconds").write_text(json.dumps(seconds))


# --- the coordinator's host -----------------------------------------------------------------------


def run_all(folder: Path, names: Sequence[str], options: Sequence[str]) -> None:
    """Run one training after the other on the cluster; a folder each says how it went."""
    for name in names:
        own = folder / name
        own.mkdir()
        update, servers, _ = name.split("-")
        words = [sys.executable, "-m", "quorate", "run", "--engine", "ray", "--workers", "2"]
        words += ["--address", HEAD, *(() if servers == "0" else ("--servers", servers))]
        words += ["--update", update]
        with (own / "log").open("w") as log:
            train = [__file__, "train", "--folder", str(own), "--updates", update, *options]
            subprocess.run([*words, *train], stdout=log, stderr=log, check=False)
        (own / "ended").touch()


# --- outside --------------------------------------------------------------------------------------


class Round(NamedTuple):
    """What was measured of one run."""

    update_s: float
    sent: list[float]  # MB per update, by host
    ages: list[int]  # staleness of each update
    applied: int  # rows of all updates
    dropped: int  # rows


def counted(folder: Path, update: str, batches: int) -> tuple[list[int], int, int]:
    """Return ages, applied and dropped rows of a run, after a check of its books."""
    text = (folder / "run" / "metrics.jsonl").read_text()
    made = [line for line in map(json.loads, text.splitlines()) if "staleness" in line]
    ages = [line["staleness"] for line in made]
    applied, dropped = (sum(line[name] for line in made) for name in ("rows", "dropped_rows"))
    assert applied + dropped == ROWS * batches, (applied, dropped)
    assert max(ages) <= parse(update).staleness, ages
    fates = [sum(made[-1][name]) for name in ("fresh", "stale")]
    of_update = SHARDS if update == "sync" else 1
    assert sum(fates) == of_update * len(made), fates
    assert fates[1] == sum(age > 0 for age in ages), fates
    return ages, applied, dropped


def measured(arguments: argparse.Namespace) -> dict[str, list[Round]]:
    """Return each round of each rule and number of servers."""
    from support.hosts import hosts

    found: dict[str, list[Round]] = {}
    names = [
        f"{update}-{servers}-{n}"
        for n in range(arguments.rounds)
        for update in arguments.updates
        for servers in arguments.servers
    ]
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
                own, kind = folder / each, each.rpartition("-")[0]
                update = kind.partition("-")[0]
                bytes_sent = [_when(own, name, made) for name in ("first", "last")]
                _await(own / "ended", own)
                print((own / "log").read_text(), file=sys.stderr, flush=True)
                seconds = json.loads((own / "seconds").read_text())
                sent = [
                    (after - before) / updates_in(arguments.steps, update) / 1e6
                    for before, after in zip(*bytes_sent, strict=True)
                ]
                books = counted(own, update, WARM + arguments.steps)
                found.setdefault(kind, []).append(Round(seconds, sent, *books))
    return found


def _options(arguments: argparse.Namespace) -> list[str]:
    """Return what each training is told."""
    named = {"millions": arguments.millions, "steps": arguments.steps, "shard-s": arguments.shard_s}
    return [word for name, value in named.items() for word in (f"--{name}", str(value))]


def _when(folder: Path, name: str, made: Sequence[Any]) -> list[int]:
    """Return what each host has sent when an update is made: "first" or "last"."""
    _await(folder / name, folder)
    return [_sent_bytes(host) for host in made]


def _sent_bytes(host: Any) -> int:
    """Return what the interface of a host has sent, headers included."""
    read = ["cat", "/sys/class/net/eth0/statistics/tx_bytes"]
    return int(subprocess.check_output(["ip", "netns", "exec", host.namespace, *read]))


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
    parser.add_argument("--updates", nargs="+", default=["sync"])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--names", nargs="+")
    arguments = parser.parse_args()
    if arguments.what == "train":
        (update,) = arguments.updates
        bounds = (updates_in(n, update) for n in (WARM, WARM + arguments.steps))
        train(arguments.millions, *bounds, arguments.shard_s, arguments.folder)
        return
    if arguments.what == "runs":
        options = _options(arguments)
        run_all(arguments.folder, arguments.names, options)
        return
    from support.hosts import obstacle

    if (why := obstacle()) is not None:
        raise SystemExit(f"no hosts can be made here: {why}")
    print(f"{arguments.millions:g} M parameters, 2 workers, links of {arguments.mbit} Mb/s")
    print(
        "update     servers  updates/s  rows/s  against first  staleness mean, max  rows applied, "
        "dropped  MB sent per update by host a (coordinator), b, c"
    )
    found = measured(arguments)
    first: dict[str, float] = {}  # by rule
    for kind, rounds in found.items():
        update, servers = kind.split("-")
        rate = 1 / statistics.median(each.update_s for each in rounds)
        rows = rate * ROWS / updates_in(1, update)
        sent = [statistics.median(column) for column in zip(*(r.sent for r in rounds), strict=True)]
        ages = [age for each in rounds for age in each.ages]
        listed = " ".join(f"{one:7.1f}" for one in sent)
        print(
            f"{update:10} {servers:>7}  {rate:9.2f}  {rows:6.1f}  "
            f"{rate / first.setdefault(update, rate):13.2f}  "
            f"{statistics.mean(ages):14.1f}, {max(ages):3}  "
            f"{sum(r.applied for r in rounds):12}, {sum(r.dropped for r in rounds):7}  {listed}"
        )


if __name__ == "__main__":
    main()
