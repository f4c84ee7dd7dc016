"""The state of worker processes, and a script's actions after its first training loop.

    quorate run --devices cpu --workers 2 tests/scripts/second_loop.py FOLDER

Each process that runs the script up to a loop leaves "about-PID.json" in FOLDER: its way of
starting and its state; and lines in "notes": its progress. Prints JSON at the end.
"""

import atexit
import json
import os
import random
import re
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

import quorate

FOLDER = Path(sys.argv[1])


def is_not_obeyed(number: int) -> bool:
    """Return whether a signal does nothing here, or has a handler of quorate."""
    handler: Any = signal.getsignal(number)
    is_own = callable(handler) and handler is not signal.default_int_handler
    return handler == signal.SIG_IGN or is_own


def about() -> dict[str, Any]:
    """Return the facts of this process."""
    links = [str(e.readlink()) for e in Path("/proc/self/fd").iterdir() if e.is_symlink()]
    return {
        "command": Path("/proc/self/cmdline").read_text().split("\0"),
        "the script's own": os.environ["OF_THE_SCRIPT"],
        # From here on the same in all workers, however they were started.
        "random": [random.random(), float(np.random.rand()), torch.initial_seed()],
        # "/dev" of "/dev/null", and "socket" of "socket:[7]".
        "held": sorted(re.sub(r"(?<=.)[/:][^/]*$", "", link) for link in links),
        "input": str(Path("/proc/self/fd/0").readlink()),
        "folder": os.getcwd(),  # noqa: PTH109
        "leads its group": os.getpgid(0) == os.getpid(),
        "tasks": len([*Path("/proc/self/task").iterdir()]),
        "not obeyed": [number for number in range(1, 32) if is_not_obeyed(number)],
        "spins": os.environ.get("OMP_WAIT_POLICY"),
        "threads": torch.get_num_threads(),
    }


def note(text: str) -> None:
    with (FOLDER / "notes").open("a") as file:
        file.write(f"{text}\n")


def rows(seed: int) -> TensorDataset:
    return TensorDataset(torch.randn(64, 6, generator=torch.Generator().manual_seed(seed)))


os.environ.setdefault("OF_THE_SCRIPT", str(os.getpid()))  # workers have the coordinator's
if quorate.is_worker():
    (FOLDER / f"about-{os.getpid()}.json").write_text(json.dumps(about()))
# A fork server, before there are workers.
children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
note("before")
atexit.register(note, "at exit")
torch.manual_seed(0)
trainer = quorate.Trainer(
    nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)),
    lambda model, batch: model(batch[0]).square().mean(),
    optimizer=lambda params: torch.optim.Adam(params, lr=1e-2),
    batch_size=16,
    shards=4,
)
data, other = rows(0), rows(1)
try:
    trainer.fit(data, epochs=1, validation=other)
    note("after fit")
finally:
    note("finally")
values = [trainer.evaluate(data), trainer.evaluate(other)]
print("other data")
trainer.fit(other, epochs=2)
values.append(trainer.evaluate(other))
own = os.environ["OF_THE_SCRIPT"]
print(json.dumps({"values": values, "children": len(children), "the script's own": own}))
