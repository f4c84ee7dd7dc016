"""Examples per second of the seed network on two hosts: ranks of quorate beside torch DDP.

    sudo python benchmarks/collective_speed.py [--rounds 5] [--steps 40] [--mbit 0 1000]

Two hosts that are network namespaces, each with one rank of one thread, 64 rows per rank, fp32,
Nesterov SGD, gloo. "native" is torch.distributed's own reduce-scatter and all-gather in the place
of ours: ordered over native is the price of order. DDP is tried as people write it, and with
channels_last and a fused optimizer. Rounds are interleaved, so that a drift of the machine hits all
alike; printed are medians, and medians of the ratios within a round. It takes root, on Linux.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))  # for support
sys.path.append(str(Path(__file__).resolve().parent))
from seed_network import PER_WORKER, Net, by_hand, quorate_on, sgd, timed

LIMIT_S = 300.0


def ddp(steps: int, *, tuned: bool) -> float:
    """Torch DDP over gloo, as a rank of torchrun."""
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"  # quorate finds it; DDP has to be told
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Net().to(memory_format=torch.channels_last) if tuned else Net()
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = sgd(wrapped.parameters(), **({"fused": True} if tuned else {}))
    step = by_hand(wrapped, optimizer, dist.get_rank(), dist.get_world_size())
    speed = timed(step, dist.get_world_size() * PER_WORKER, steps)
    dist.destroy_process_group()
    return speed


CONTENDERS: dict[str, Callable[[int], float]] = {
    "DDP": lambda steps: ddp(steps, tuned=False),
    "DDP, tuned": lambda steps: ddp(steps, tuned=True),
    "quorate, ordered": lambda steps: quorate_on("collective", 2, steps),
    "quorate, native": lambda steps: quorate_on("collective", 2, steps, exchange="native"),
}
RATIOS = [
    ("quorate, ordered", "DDP"),
    ("quorate, ordered", "DDP, tuned"),
    ("quorate, native", "DDP"),
    ("quorate, ordered", "quorate, native"),
]


def rank(name: str, steps: int, out: Path) -> None:
    """Be a rank; rank 0 writes down its speed."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    speed = CONTENDERS[name](steps)
    if os.environ["RANK"] == "0":
        out.write_text(json.dumps(speed))


def speed(name: str, steps: int, mbit: int) -> float:
    """Return the examples per second of a contender on two hosts; 0 Mbit/s: as fast as it goes."""
    from support.hosts import end_all, hosts, torchrun

    with tempfile.TemporaryDirectory() as folder, hosts(2) as made:
        for host in made:
            if mbit:
                host.slow(mbit)
        out = Path(folder) / "speed"
        words = torchrun("2", 1, __file__, "rank", name, str(steps), str(out), at="host-a:29400")
        ended = end_all([host.start(words) for host in made], LIMIT_S)
        if not out.exists():
            raise SystemExit("\n".join(each.out for each in ended))
        return float(json.loads(out.read_text()))


def main() -> None:
    """Run the rounds and print medians and ratios."""
    if sys.argv[1:2] == ["rank"]:
        name, steps, out = sys.argv[2:]
        rank(name, int(steps), Path(out))
        return
    from support.hosts import obstacle

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--mbit", type=int, nargs="+", default=[0, 1000], help="of each link")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if (why := obstacle()) is not None:
        raise SystemExit(f"no hosts can be made here: {why}")
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}")
    found: dict[str, dict[str, list[float]]] = {}
    for mbit in options.mbit:
        speeds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
        for _ in range(options.rounds):
            for name, listed in speeds.items():
                listed.append(speed(name, options.steps, mbit))
        link = f"{mbit} Mbit/s" if mbit else "no bound"
        found[link] = speeds
        for name, listed in speeds.items():
            spread = f"{min(listed):,.0f} to {max(listed):,.0f}"
            print(f"{link:12} {name:18} {statistics.median(listed):7,.0f} examples/s   ({spread})")
        for one, other in RATIOS:
            ratio = statistics.median(
                a / b for a, b in zip(speeds[one], speeds[other], strict=True)
            )
            print(f"{link:12} {one} / {other}: {ratio:.3f}", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"torch": torch.__version__, "examples_per_s": found}))


if __name__ == "__main__":
    main()
