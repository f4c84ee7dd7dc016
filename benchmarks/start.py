"""How long the first update takes to come: a plain script, and the same model by `quorate run`.

    python benchmarks/start.py [--rounds 5] [--json FILE]

A perceptron of 32, 64 and 4, 64 rows, Adam. The plain script imports torch and makes one update by
hand. Against it: `quorate run --workers 1`, with 2 and 4 worker processes, and `python train.py`,
whose workers are processes too. Rounds are interleaved. Printed are medians over the rounds of the
seconds from the start to the first update and of the processor time of all processes to their end,
which says more on a machine that others use; and the bound: 1.3 times the plain script, and 0.4 s
for each worker process.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

FACTOR, PER_PROCESS_S = 1.3, 0.4

# Of the whole machine: the clock of the parent's too.
SAYS = 'print("first update at", time.clock_gettime(time.CLOCK_MONOTONIC), flush=True)\n'

PLAIN = """
import time
import torch
import torch.nn.functional as F
torch.set_num_threads(1)
x, y = torch.randn(256, 32), torch.randint(0, 4, (256,))
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
value = F.cross_entropy(model(x[:64]), y[:64])
optimizer.zero_grad()
value.backward()
optimizer.step()
"""
OURS = """
import time
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset
import quorate
torch.manual_seed(0)
def net():
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])
trainer = quorate.Trainer(net, loss, optimizer=torch.optim.Adam, batch_size=64, WORKERS)
data = TensorDataset(torch.randn(256, 32), torch.randint(0, 4, (256,)))
for update in trainer.updates(data, steps=1):
    \
"""


class Contender(NamedTuple):
    """A way to the first update."""

    processes: int  # worker processes of it
    script: str
    options: list[str] | None  # of quorate run; None: python runs the script


def _by_run(workers: int, processes: int) -> Contender:
    count = ["--devices", "cpu", "--workers", str(workers)]
    return Contender(processes, OURS.replace(", WORKERS", "") + SAYS, count)


CONTENDERS = {
    "plain script": Contender(0, PLAIN + SAYS, None),
    "quorate run, 1 worker": _by_run(1, 0),
    "quorate run, 2 processes": _by_run(2, 2),
    "quorate run, 4 processes": _by_run(4, 4),
    "python, 2 processes": Contender(
        2, OURS.replace("WORKERS", 'devices="cpu", workers=2') + SAYS, None
    ),
}


class Start(NamedTuple):
    """What one start took."""

    first_update_s: float
    cpu_s: float  # of all processes, to their end


def start(contender: Contender, script: Path) -> Start:
    """Run a contender once."""
    script.write_text(contender.script)
    words = [sys.executable, str(script)]
    if contender.options is not None:
        words = [sys.executable, "-m", "quorate", "run", *contender.options, str(script)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begun = time.clock_gettime(time.CLOCK_MONOTONIC)
    ended = subprocess.run(words, check=True, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    at = next(line for line in ended.stdout.splitlines() if line.startswith("first update at"))
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Start(float(at.split()[-1]) - begun, cpu_s)


def main() -> None:
    """Run the rounds; print medians and whether they are within the bound."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, list[Start]] = {name: [] for name in CONTENDERS}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds + 1):
            for name, contender in CONTENDERS.items():
                taken = start(contender, Path(folder, "train.py"))
                if number > 0:  # the first round reads files into memory
                    found[name].append(taken)
    load = os.getloadavg()[0]
    print(f"{platform.machine()}, {os.cpu_count()} cores, a load of {load:.1f} at the end")
    plain = statistics.median(each.first_update_s for each in found["plain script"])
    for name, starts in found.items():
        first = statistics.median(each.first_update_s for each in starts)
        cpu = statistics.median(each.cpu_s for each in starts)
        bound = FACTOR * plain + PER_PROCESS_S * CONTENDERS[name].processes
        within = "" if name == "plain script" else f"   ({first / bound:.2f} of {bound:.2f} s)"
        print(f"{name:25} {first:6.2f} s, {cpu:6.2f} s of processors{within}")
    if options.json:
        listed = {name: [each._asdict() for each in starts] for name, starts in found.items()}
        options.json.write_text(json.dumps({"load": load, "starts": listed}, indent=1) + "\n")


if __name__ == "__main__":
    main()
