"""Kills a worker, then a whole run, and compares the weights with those of an undisturbed run.

    python examples/kill_it.py      # three trainings on the CPU, a minute or less, no download

Training "worker killed" loses one of its two workers to kill -9. Training "run killed" is killed
as a whole after its first checkpoint, and is resumed on one worker. Training "undisturbed" is left
alone. The three digests are equal, or the exit code is 1.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import quorate

TRAINS = "train"  # the argument with which quorate run is given this file
LIMIT_S = 300.0  # for anything that a training should do soon


def loss(model: torch.nn.Module, batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Cross entropy and accuracy, means over the rows of the batch."""
    points, inside = batch
    logits = model(points)
    accuracy = (logits.argmax(1) == inside).float().mean()
    return {"loss": F.cross_entropy(logits, inside), "accuracy": accuracy}


def net() -> torch.nn.Module:
    """Two coordinates to two logits, with dropout: 0.5 million parameters."""
    return torch.nn.Sequential(
        torch.nn.Linear(2, 512),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.1),
        torch.nn.Linear(512, 512),
        torch.nn.ReLU(),
        torch.nn.Linear(512, 512),
        torch.nn.ReLU(),
        torch.nn.Linear(512, 2),
    )


def train() -> None:
    """Train a network to tell which points lie in a circle."""
    points = torch.rand(20_000, 2, generator=torch.Generator().manual_seed(0))
    inside = ((points - 0.5).norm(dim=1) < 0.4).long()
    trainer = quorate.Trainer(
        net,
        loss,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.001),
        batch_size=512,
        shards=4,
        run_dir=quorate.RunDir("runs/kill_it", save_every_steps=100),
    )
    trainer.fit(TensorDataset(points, inside), epochs=8)


class Training:
    """A training in a process of its own, in a session that can be killed as a whole."""

    def __init__(self, run_dir: Path, workers: int) -> None:
        self.run_dir = run_dir
        options = ["--devices", "cpu", "--workers", str(workers), "--run-dir", str(run_dir)]
        command = [sys.executable, "-m", "quorate", "run", *options, __file__, TRAINS]
        print(f"$ quorate run {' '.join(options)} {Path(__file__).name} {TRAINS}", flush=True)
        self._process = subprocess.Popen(command)

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Wait until something is so; the training must not have ended before."""
        deadline = time.monotonic() + LIMIT_S
        while not is_so():
            if self._process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"kill_it.py: the training in {self.run_dir} ended before it was killed")
            time.sleep(0.02)

    def updates(self) -> int:
        """Return how many updates were logged."""
        log = self.run_dir / "metrics.jsonl"
        return len(log.read_bytes().splitlines()) if log.exists() else 0

    def has_saved(self) -> bool:
        """Return whether there is a checkpoint."""
        return any(self.run_dir.glob("checkpoints/step-*"))

    def kill_worker(self) -> None:
        """Send SIGKILL to the worker that was started last."""
        processes = psutil.Process(self._process.pid).children(recursive=True)
        parents = {process.ppid() for process in processes}
        workers = [process for process in processes if process.pid not in parents]
        newest = max(workers, key=lambda process: process.create_time())
        print(f"$ kill -9 {newest.pid}  # a worker", flush=True)
        newest.send_signal(signal.SIGKILL)

    def kill(self) -> None:
        """Send SIGKILL to the whole run: its workers end with it."""
        print(f"$ kill -9 {self._process.pid}  # the run", flush=True)
        self._process.kill()
        self._process.wait()

    def finish(self) -> None:
        """Wait for the end."""
        if self._process.wait() != 0:
            sys.exit(f"kill_it.py: the training in {self.run_dir} failed")

    def digest(self) -> str:
        """Return the digest of the trained weights: names, shapes, dtypes and bytes."""
        command = [sys.executable, "-m", "quorate", "inspect", "--json", str(self.run_dir)]
        shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        digest: str = json.loads(shown)["digest"]
        return digest


def main() -> None:
    """Run the three trainings, and compare."""
    with tempfile.TemporaryDirectory() as folder:
        one_killed = Training(Path(folder) / "worker-killed", workers=2)
        one_killed.wait_until(lambda: one_killed.updates() > 20)
        one_killed.kill_worker()
        one_killed.finish()

        all_killed = Training(Path(folder) / "run-killed", workers=2)
        all_killed.wait_until(all_killed.has_saved)
        all_killed.kill()
        resumed = Training(Path(folder) / "run-killed", workers=1)
        resumed.finish()

        undisturbed = Training(Path(folder) / "undisturbed", workers=2)
        undisturbed.finish()

        digests = {
            "worker killed": one_killed.digest(),
            "run killed, resumed": resumed.digest(),
            "undisturbed": undisturbed.digest(),
        }
    for what, digest in digests.items():
        print(f"{what:<20} {digest}")
    if len(set(digests.values())) != 1:
        sys.exit("kill_it.py: the weights differ")
    print("the same bits, three times")


if __name__ == "__main__":
    train() if sys.argv[1:] == [TRAINS] else main()
