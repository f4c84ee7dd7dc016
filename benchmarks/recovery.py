"""How long a run stands still after a worker was killed with signal 9: quorate beside torchrun.

    python benchmarks/recovery.py [--kills 20] [--json FILE]

The seed network on two CPU workers, 64 rows each. In turn and at random moments one of the two is
killed; timed is from the kill to the next update. quorate: the other worker computes the shard, and
a third time says when the new worker takes part. torchrun --max-restarts: all ranks are started
again; the script saves nothing and loads nothing, which flatters it. Ranks that make no update in
20 s hang: that is counted as infinite, and torchrun started anew.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).parent))
from seed_network import PER_WORKER, Net, by_hand, data, loss, sgd

import quorate

SETTLED = 15  # updates between one recovery and the next kill


def quorate_role(kills: int) -> None:
    """Train, and kill a worker now and then. Prints JSON."""
    trainer = quorate.Trainer(
        Net,
        loss,
        optimizer=sgd,
        batch_size=2 * PER_WORKER,
        shards=2,
        devices="cpu",
        workers=quorate.Workers(2, engine="processes"),
    )
    chance = random.Random(0)
    killed_at: list[float] = []
    stalls: list[float] = []
    whole: list[float] = []
    calm = 0
    for _ in trainer.updates(TensorDataset(*data()), steps=10**9):
        now = time.monotonic()
        alive = [w.pid for w in trainer.workers if w.pid is not None and w.phase != "starting"]
        if len(killed_at) > len(stalls):
            stalls.append(now - killed_at[-1])
        if len(stalls) > len(whole) and len(alive) == 2:
            whole.append(now - killed_at[-1])
            calm = 0
        calm += len(alive) == 2
        if len(whole) == kills:
            break
        if calm == SETTLED:
            calm += 1
            pid = chance.choice(alive)

            def kill(pid: int = pid) -> None:
                killed_at.append(time.monotonic())
                os.kill(pid, signal.SIGKILL)

            threading.Timer(chance.uniform(0.0, 0.05), kill).start()
    print(json.dumps({"stalls_s": stalls, "whole_s": whole}))


def ddp_role(log: Path) -> None:
    """One rank of the same training under torchrun."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with log.open("a", buffering=1) as lines:
        lines.write(f"pid {rank} {os.getpid()} ;\n")
        wrapped = nn.parallel.DistributedDataParallel(Net())
        step = by_hand(wrapped, sgd(wrapped.parameters()), rank, 2)
        while True:
            step()
            if rank == 0:
                lines.write(f"step {time.monotonic()} ;\n")


def torchrun(kills: int) -> list[float]:
    """Seconds from each kill to the next update; infinite where there was none in 20 s."""
    chance = random.Random(0)
    stalls: list[float] = []
    while len(stalls) < kills:
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "log"
            log.touch()
            agent = subprocess.Popen(
                [
                    *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
                    *("--standalone", "--max-restarts", str(kills), __file__, "--role", str(log)),
                ],
                stderr=subprocess.DEVNULL,
            )
            try:
                while len(stalls) < kills:
                    stalls.append(one_kill(log, chance))
                    if stalls[-1] == float("inf"):
                        break
            finally:
                agent.kill()
                agent.wait()
                end_all_with(str(log))
    return stalls


def end_all_with(word: str) -> None:
    """Kill the processes that have a word in their command: ranks that hang outlive their agent."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            with suppress(OSError):
                if word in (folder / "cmdline").read_text():
                    os.kill(int(folder.name), signal.SIGKILL)


def one_kill(log: Path, chance: random.Random) -> float:
    """Kill a rank when training has settled; seconds until the new ranks make an update."""

    def generation() -> tuple[dict[str, int], list[float]]:
        """The newest ranks' process ids, and when they made updates."""
        lines = [line.split() for line in log.read_text().splitlines() if line.endswith(";")]
        first = max((i for i, line in enumerate(lines) if line[0] == "pid"), default=0)
        first -= first > 0 and lines[first - 1][0] == "pid"
        pids = {line[1]: int(line[2]) for line in lines[first:] if line[0] == "pid"}
        return pids, [float(line[1]) for line in lines[first:] if line[0] == "step"]

    while True:
        pids, steps = generation()
        if len(pids) == 2 and len(steps) >= SETTLED:
            break
        time.sleep(0.01)
    time.sleep(chance.uniform(0.0, 0.05))
    killed_at = time.monotonic()
    os.kill(pids[chance.choice("01")], signal.SIGKILL)
    while time.monotonic() < killed_at + 20:
        new, steps = generation()
        if len(new) == 2 and not set(new.values()) & set(pids.values()) and steps:
            return steps[0] - killed_at
        time.sleep(0.002)
    return float("inf")


def main() -> None:
    """Run both and print medians and worst."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--role", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role == "quorate":
        quorate_role(options.kills)
        return
    if options.role:
        ddp_role(Path(options.role))
        return
    command = [sys.executable, __file__, "--role", "quorate", "--kills", str(options.kills)]
    ended = subprocess.run(command, check=True, capture_output=True, text=True)
    ours = json.loads(ended.stdout.splitlines()[-1])
    times = {
        "quorate, next update": ours["stalls_s"],
        "quorate, both workers again": ours["whole_s"],
        "torchrun, next update": torchrun(options.kills),
    }
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}")
    for name, found in times.items():
        middle, worst = statistics.median(found), max(found)
        print(f"{name:28} median {middle:6.2f} s, worst of {len(found)} {worst:6.2f} s", flush=True)
    if options.json:
        options.json.write_text(json.dumps(times, indent=1) + "\n")


if __name__ == "__main__":
    main()
