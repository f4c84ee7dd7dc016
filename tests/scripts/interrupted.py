"""A run that is killed, or told to stop, at random moments, and begun again each time.

    python tests/scripts/interrupted.py RUN_DIR SIGNAL TIMES SEED [ENGINE]

Every run is a process group, and all of the group get the signal: for towers one process, forked
from this one, which has imported torch; for worker processes the command and what it starts.

Prints a line of JSON: the digest, that of an undisturbed run, and of each interruption how long the
command lived on, its exit code, the updates that were made then, and those that the disk had.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # torch imports it with the first optimizer: 2 s in each process
from torch import nn
from torch.utils.data import Dataset

import quorate
from quorate.replica.digest import digest
from quorate.services.checkpoints import files

STEPS, EVERY = 150, 7
WHERE = ("start", "step", "save", "save")


class Noisy(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __len__(self) -> int:
        return 110

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(1, 6, 6) + row / 100, torch.tensor([row / 110])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8)
        self.last = nn.Linear(8 * 16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.convolution(x)).relu().flatten(1)
        return self.last(nn.functional.dropout(x, 0.2, self.training))


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def train(run_dir: Path, workers: int, engine: str) -> None:
    trainer = quorate.Trainer(
        Model,
        loss,
        optimizer=quorate.Optimize(
            lambda params: torch.optim.Adam(params, lr=1e-3),
            schedule=lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, STEPS),
            ema_decay=0.99,
            clip_norm=1.0,
        ),
        batch_size=16,
        shards=4,
        devices="cpu",
        workers=quorate.Workers(workers, engine=engine),
        run_dir=quorate.RunDir(run_dir, save_every_steps=EVERY, summary_every_s=None),
    )
    trainer.fit(Noisy(), steps=STEPS, validation=Noisy())


def start(run_dir: Path, workers: int, engine: str) -> int:
    """A process that trains, and leads a group; its pid."""
    out = os.open(run_dir.parent / "said", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        if engine == "processes":
            words = [sys.executable, "-m", "quorate", "run", __file__, "train"]
            words += [str(run_dir), str(workers)]
            run = subprocess.Popen(words, stdout=out, stderr=out, process_group=0)
            run.returncode = 0  # who started it waits for it
            return run.pid
        if (pid := os.fork()) == 0:
            code = 1
            try:
                os.dup2(out, 1)
                os.dup2(out, 2)
                train(run_dir, workers, engine)
                code = 0
            except SystemExit as leaving:
                code = int(str(leaving.code))
            finally:
                os._exit(code)
        os.setpgid(pid, pid)
        return pid
    finally:
        os.close(out)


def digest_of(run_dir: Path) -> str:
    found = files.find(run_dir)
    assert found is not None
    tensors = [
        (name, value)
        for file in ("model", "averaged")
        for name, value in sorted(files.tensors(found.path, f"{file}.safetensors").items())
    ]
    return digest(tensors)


def made(run_dir: Path) -> int:
    """Updates that were made, by the log, which is written line by line."""
    log = run_dir / "metrics.jsonl"
    lines = log.read_text().splitlines() if log.exists() else []
    steps = [json.loads(line)["global_step"] for line in lines if line.endswith("}")]
    return max(steps, default=0)


def is_saving(run_dir: Path) -> bool:
    return any((run_dir / "checkpoints").glob(f"{files.TEMPORARY}*"))


def interrupted(
    run_dir: Path, number: signal.Signals, chance: random.Random, engine: str
) -> dict[str, Any] | None:
    """One start and its interruption; None if the run came to its end."""
    pid = start(run_dir, chance.choice([1, 2, 3]), engine)
    where, before = chance.choice(WHERE), made(run_dir)
    goal = before + chance.randrange(1, 4 * EVERY)
    # A command imports torch first; its workers then start.
    longest_s = 0.5 if engine == "towers" else 6.0
    until = time.monotonic() + chance.uniform(0.0, longest_s)
    ended = 0

    def is_time() -> bool:
        if where == "start":
            return time.monotonic() >= until
        if made(run_dir) < goal or (where == "save" and not is_saving(run_dir)):
            return False
        time.sleep(chance.uniform(0.0, 0.004))
        if where == "save":
            # It is looked at while it stands still: the save may be over, on a busy machine.
            os.killpg(pid, signal.SIGSTOP)
            time.sleep(0.002)
            if not is_saving(run_dir):
                os.killpg(pid, signal.SIGCONT)
                return False
        return True

    while not ended and not is_time():
        ended, status = os.waitpid(pid, os.WNOHANG)
        time.sleep(0.0005)
    if not ended:
        was_saving = is_saving(run_dir)
        os.killpg(pid, number)
        os.killpg(pid, signal.SIGCONT)
        at = time.monotonic()
        _, status = os.waitpid(pid, 0)
        found = files.find(run_dir)
        return {
            "lived_s": time.monotonic() - at,
            "where": where,
            "code": os.waitstatus_to_exitcode(status),
            "was_saving": was_saving,
            "made": made(run_dir),
            "saved": 0 if found is None else found.record["global_step"],
            "damaged": [] if found is None else found.passed_over,
        }
    assert os.waitstatus_to_exitcode(status) == 0
    return None


def main(run_dir: Path, number: signal.Signals, times: int, seed: int, engine: str) -> None:
    chance = random.Random(seed)
    alone = run_dir.parent / "alone"
    os.waitpid(start(alone, 1, "towers"), 0)
    interruptions: list[dict[str, Any]] = []
    while len(interruptions) < times:
        found = interrupted(run_dir, number, chance, engine)
        if found is None:  # it is done: once more, from the start
            assert digest_of(run_dir) == digest_of(alone)
            run_dir = run_dir.with_name(f"{run_dir.name}-{len(interruptions)}")
        else:
            interruptions.append(found)
    os.waitpid(start(run_dir, 2, engine), 0)
    digests = {"digest": digest_of(run_dir), "undisturbed": digest_of(alone)}
    print(json.dumps(digests | {"interruptions": interruptions}))


if __name__ == "__main__":
    if sys.argv[1] == "train":
        train(Path(sys.argv[2]), int(sys.argv[3]), "processes")
    else:
        engine = sys.argv[5] if len(sys.argv) > 5 else "towers"
        number, times, seed = (int(word) for word in sys.argv[2:5])
        main(Path(sys.argv[1]), signal.Signals(number), times, seed, engine)
