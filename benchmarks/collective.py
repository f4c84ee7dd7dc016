"""The collective engine on several hosts: what it puts on the wire.

    sudo python benchmarks/collective.py bytes [--millions 5] [--steps 20] [--json FILE]
    sudo python benchmarks/collective.py messages [--mbit 1000] [--mb 26] [--json FILE]

Hosts are network namespaces on one switch, so this takes root, on Linux.

`bytes`: what the interface of each of N hosts has sent per update, as the kernel counts it, over
what a ring all-reduce of the hosts sends: 2(N-1)/N of the bytes of the parameters. All is in it:
gradients and parameters, rank 0's calls, heartbeats, torchrun's store, acknowledgements, and
headers. Nothing is subtracted. Namespaces hand over up to 64 KB as one packet with one header: on
Ethernet with packets of 1,500 bytes headers add 5%, for this and for a ring alike. Counters are
read while rank 0 holds up the ranks between two updates.

`messages`: how long two hosts take to send each other as much as that, each way at once, by gloo
alone, in messages of several sizes of which several are under way. The links are bounded.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))  # for support

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import quorate

WIDTH = 500
MESSAGE_KB, DEPTHS = (256, 1024, 2048, 8192), (1, 2, 3)
WARM = 5  # updates before anything is counted
LIMIT_S = 300.0


# --- a rank ---------------------------------------------------------------------------------------


class Hold(quorate.Callback):
    """Holds up all ranks after some updates, until a file is there."""

    def __init__(self, folder: Path, steps: Sequence[int]) -> None:
        self._folder, self._steps = folder, steps

    def updated(self, report: Any) -> None:
        if (step := report.global_step) in self._steps:
            (self._folder / f"held-{step}").touch()
            while not (self._folder / f"go-{step}").exists():
                time.sleep(0.01)


def train(folder: Path, shards: int, parameters: int, steps: int) -> None:
    """Train a perceptron with about so many parameters."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(max(1, parameters // WIDTH**2))]
    x = torch.randn(64, WIDTH)
    trainer = quorate.Trainer(
        nn.Sequential(*layers, nn.Linear(WIDTH, 1)),
        lambda model, batch: model(batch[0]).square().mean(),
        optimizer=lambda params: torch.optim.Adam(params, lr=1e-5),
        batch_size=16,
        shards=shards,
        devices="cpu",
    )
    count = sum(p.numel() for p in trainer.model.parameters())
    (folder / "parameters").write_text(str(count))
    trainer.fit(TensorDataset(x), steps=steps, callbacks=[Hold(folder, (WARM, steps))])


# --- bytes ----------------------------------------------------------------------------------------


def sent(number: int, per_host: int, shards: int, parameters: int, steps: int) -> dict[str, Any]:
    """Return how many bytes each of so many hosts has sent per update."""
    from support.hosts import end_all, hosts, torchrun

    with tempfile.TemporaryDirectory() as name, hosts(number) as made:
        folder = Path(name)
        arguments = map(str, (name, shards, parameters, WARM + steps))
        words = torchrun(str(number), per_host, __file__, "rank", *arguments, at="host-a:29400")
        log = [(folder / f"{host.name}.log").open("w+") for host in made]
        ranks = [host.start(words, out=out) for host, out in zip(made, log, strict=True)]
        counted = []
        for step in (WARM, WARM + steps):
            deadline = time.monotonic() + LIMIT_S
            while not (folder / f"held-{step}").exists():
                if time.monotonic() > deadline or any(rank.poll() is not None for rank in ranks):
                    raise SystemExit((folder / "host-a.log").read_text())
                time.sleep(0.01)
            counted.append([host.carried()[0] for host in made])
            (folder / f"go-{step}").touch()
        end_all(ranks, LIMIT_S)
        for out in log:
            out.close()
        count = int((folder / "parameters").read_text())
    each = [(after - before) / steps for before, after in zip(*counted, strict=True)]
    ring = 2 * (number - 1) / number * 4 * count
    setting = {"hosts": number, "ranks": number * per_host, "shards": shards, "parameters": count}
    return {**setting, "sent": each, "ring": ring}


def on_the_wire(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Print the bytes for 2 and 3 hosts of one rank, 2 of two, and 4 and 8 shards."""
    from support.hosts import obstacle

    if (why := obstacle()) is not None:
        raise SystemExit(f"no hosts can be made here: {why}")
    names = "hosts  ranks  shards  parameters  ring MB"
    print(f"{names}  sent MB by each               mean / ring  most / ring")
    found = []
    for number, per_host in ((2, 1), (3, 1), (2, 2)):
        for shards in (4, 8):
            result = sent(number, per_host, shards, int(arguments.millions * 1e6), arguments.steps)
            found.append(result)
            ring, each = result["ring"], result["sent"]
            listed = " ".join(f"{one / 1e6:9.3f}" for one in each)
            print(
                f"{number:5}  {result['ranks']:5}  {shards:6}  {result['parameters']:10,}  "
                f"{ring / 1e6:7.3f}  {listed:29} {statistics.mean(each) / ring:11.4f}  "
                f"{max(each) / ring:11.4f}",
                flush=True,
            )
    return found


# --- messages -------------------------------------------------------------------------------------


def send_messages(out: Path, nbytes: int) -> None:
    """Be one of two ranks that send each other so much; rank 0 writes down how long it takes."""
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    dist.init_process_group("gloo")
    other = 1 - dist.get_rank()
    given, taken = torch.ones(nbytes, dtype=torch.uint8), torch.empty(nbytes, dtype=torch.uint8)
    found = []
    for size, depth in product(MESSAGE_KB, DEPTHS):
        times = []
        for _ in range(5):
            dist.barrier()
            begun = time.perf_counter()
            under_way: deque[Any] = deque()
            for one, two in zip(given.split(size << 10), taken.split(size << 10), strict=True):
                pair = [dist.P2POp(dist.isend, one, other), dist.P2POp(dist.irecv, two, other)]
                under_way += dist.batch_isend_irecv(pair)
                while len(under_way) > 2 * (depth - 1):
                    under_way.popleft().wait()
            for work in under_way:
                work.wait()
            dist.barrier()  # a send is over when it is in the kernel
            times.append(time.perf_counter() - begun)
        found.append({"kb": size, "depth": depth, "ms": 1e3 * statistics.median(times)})
    dist.destroy_process_group()
    if os.environ["RANK"] == "0":
        out.write_text(json.dumps(found))


def messages(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Print the time by size and number under way."""
    from support.hosts import end_all, hosts, obstacle, torchrun

    if (why := obstacle()) is not None:
        raise SystemExit(f"no hosts can be made here: {why}")
    with tempfile.TemporaryDirectory() as folder, hosts(2) as made:
        for host in made:
            host.slow(arguments.mbit)
        out, nbytes = Path(folder) / "found", int(arguments.mb * 1e6)
        words = torchrun(
            "2", 1, __file__, "messages-rank", str(out), str(nbytes), at="host-a:29400"
        )
        ended = end_all([host.start(words) for host in made], LIMIT_S)
        if not out.exists():
            raise SystemExit("\n".join(each.out for each in ended))
        found: list[dict[str, Any]] = json.loads(out.read_text())
    least = 8 * nbytes / arguments.mbit / 1e3
    print(f"{nbytes / 1e6:g} MB each way at {arguments.mbit} Mbit/s: at least {least:.0f} ms")
    for each in found:
        print(f"{each['kb']:6} KB, {each['depth']} under way: {each['ms']:7.1f} ms")
    return found


# --- the command ----------------------------------------------------------------------------------


def main() -> None:
    """Do what the command line says."""
    if sys.argv[1:2] == ["rank"]:
        folder, *numbers = sys.argv[2:]
        train(Path(folder), *map(int, numbers))
        return
    if sys.argv[1:2] == ["messages-rank"]:
        send_messages(Path(sys.argv[2]), int(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("bytes", help="bytes on the wire, over those of a ring")
    command.add_argument("--millions", type=float, default=5.0, help="of parameters")
    command.add_argument("--steps", type=int, default=20)
    command.set_defaults(measure=on_the_wire)
    command = commands.add_parser("messages", help="time of messages of several sizes")
    command.add_argument("--mbit", type=int, default=1000, help="of each link, per second")
    command.add_argument("--mb", type=float, default=26.0, help="megabytes each way")
    command.set_defaults(measure=messages)
    for each in commands.choices.values():
        each.add_argument("--json", type=Path, help="where to keep the raw numbers")
    arguments = parser.parse_args()
    measure: Callable[[argparse.Namespace], Any] = arguments.measure
    found = measure(arguments)
    if arguments.json is not None:
        about = {
            "torch": torch.__version__,
            "machine": platform.processor(),
            "cores": os.cpu_count(),
        }
        with suppress(FileExistsError):
            arguments.json.parent.mkdir(parents=True)
        arguments.json.write_text(json.dumps({"about": about, "results": found}, indent=1))


if __name__ == "__main__":
    main()
