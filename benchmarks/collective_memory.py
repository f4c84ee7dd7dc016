"""The memory of ranks: what each holds in training, while it saves, and while it resumes.

    python benchmarks/collective_memory.py [--millions 200] [--ranks 1,2] [--json FILE]

Linear layers of 25 M parameters each, Adam, two shards of one row: memory is that of the state.
Figures are of the kernel, by process, in GiB: "own" is the proportional share (Pss), in which what
ranks of a host share is divided among them, and "all" the resident set. "steady" is between two
updates, the others the most of their time: from the start to the first updates, in a save, and in
a start from a checkpoint. Sampled five times a second: what is shorter is not seen. "state" are the
bytes of the tensors that the optimizer which a rank steps has for its parameters.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import TensorDataset

import quorate
from quorate.engines.collective.rank_place import own_place

WIDTH = 5000
LIMIT_S = 600.0
PHASES = ("start", "steady", "save", "resume")


# --- a rank ---------------------------------------------------------------------------------------


class Phases(quorate.Callback):
    """Says what rank 0 is at."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "phase"

    def updated(self, report: Any) -> None:
        if report.global_step == 2:
            self._file.write_text("steady")
            time.sleep(1.0)
            self._file.write_text("save")  # which follows the next update

    def saved(self, global_step: int, path: Path) -> None:  # noqa: ARG002
        self._file.write_text("over")


class Layers(nn.Module):
    """Linear layers with what keeps their values small."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def train(folder: Path, layers: int, steps: int) -> None:
    """Train on this rank, whose process is noted."""
    place = own_place()
    rank = 0 if place is None else place.rank
    (folder / f"rank-{rank}").write_text(str(os.getpid()))
    register_optimizer_step_post_hook(partial(note_state, folder, rank))
    torch.manual_seed(0)
    trainer = quorate.Trainer(
        Layers(layers),
        lambda model, batch: model(batch[0]),
        optimizer=lambda params: torch.optim.Adam(params, lr=1e-4),
        batch_size=2,
        shards=2,
        seed=0,
        devices="cpu",
        run_dir=quorate.RunDir(str(folder / "run"), save_every_steps=3),
        compute=quorate.Compute(spot_check_every=0),
    )
    trainer.fit(TensorDataset(torch.randn(8, WIDTH)), steps=steps, callbacks=[Phases(folder)])


def note_state(folder: Path, rank: int, optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Note the bytes of an optimizer's state, if it has some: after each step."""
    entries = (entry for own in optimizer.state.values() for entry in own.values())
    if nbytes := sum(entry.nbytes for entry in entries if isinstance(entry, torch.Tensor)):
        (folder / f"state-{rank}").write_text(str(nbytes))


# --- the measurement ------------------------------------------------------------------------------


def memory(pid: int) -> tuple[float, float] | None:
    """Return the proportional share and the resident set of a process, in GiB."""
    with suppress(OSError, KeyError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
        values = {line.split(":")[0]: int(line.split()[1]) for line in lines}
        return values["Pss"] / (1 << 20), values["Rss"] / (1 << 20)
    return None


def measured(folder: Path, ranks: int, layers: int, steps: int, first: str) -> dict[str, Any]:
    """Return the most that each rank had, by phase; of "steady" what it had in the end."""
    (folder / "phase").write_text(first)
    for old in folder.glob("rank-*"):
        old.unlink()
    engine = ["--engine", "collective", "--workers", str(ranks)]
    words = [str(Path(__file__).resolve()), "train", str(folder), str(layers), str(steps)]
    started = subprocess.Popen(
        [sys.executable, "-m", "quorate", "run", *engine, *words], stdout=subprocess.DEVNULL
    )
    found: dict[str, dict[int, tuple[float, float]]] = defaultdict(dict)
    until = time.monotonic() + LIMIT_S
    while started.poll() is None:
        if time.monotonic() > until:
            started.kill()
            raise TimeoutError(f"{ranks} ranks took more than {LIMIT_S} s")
        phase = (folder / "phase").read_text()
        for file in folder.glob("rank-*"):
            text, rank = file.read_text(), int(file.name[5:])
            if phase in PHASES and text and (now := memory(int(text))) is not None:
                before = found[phase].get(rank, (0.0, 0.0))
                is_last = phase == "steady"
                found[phase][rank] = (
                    now if is_last else (max(before[0], now[0]), max(before[1], now[1]))
                )
        time.sleep(0.2)
    if started.returncode:
        raise RuntimeError(f"{ranks} ranks ended with {started.returncode}")
    return {phase: [of[rank] for rank in sorted(of)] for phase, of in found.items()}


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--millions", type=int, default=200)
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    layers = options.millions // 25
    results: dict[str, Any] = {}
    for ranks in map(int, options.ranks.split(",")):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            found = measured(folder, ranks, layers, 3, "start")
            found |= {"resume": measured(folder, ranks, layers, 4, "resume")["resume"]}
            state = [int((folder / f"state-{rank}").read_text()) for rank in range(ranks)]
        results[str(ranks)] = {**found, "state": state}
        for phase in PHASES:
            each = ", ".join(f"{own:.2f} own {all_:.2f} all" for own, all_ in found[phase])
            print(f"{ranks} rank(s)  {phase:7} {each}", flush=True)
        each = ", ".join(f"{nbytes / (1 << 30):.3f}" for nbytes in state)
        print(f"{ranks} rank(s)  state   {each}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        train(Path(sys.argv[2]), *map(int, sys.argv[3:]))
    else:
        main()
