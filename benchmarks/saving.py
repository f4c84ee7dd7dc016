"""What saving costs: a state of 200 MB, saved every 10 s in the background, on two workers.

    python benchmarks/saving.py [--rounds 3] [--seconds 30] [--engine processes]

Rounds of training with and without saves take turns in one process. Stall: the share by which
updates take longer with saves. Copy: what the loop itself waits for at each save.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import quorate
from quorate import checkpoint
from quorate.services.checkpoints import Checkpoints, Policy

WIDTH, LAYERS, ROWS = 2048, 4, 64


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each round")
    parser.add_argument("--every-s", type=float, default=10.0)
    parser.add_argument("--engine", default="processes")
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.randn(4096, WIDTH, generator=generator), torch.randn(4096, WIDTH, generator=generator)
    )
    run_dir = Path(tempfile.mkdtemp(prefix="quorate-saving-", dir="."))
    trainer = quorate.Trainer(
        lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))),
        loss,
        optimizer=torch.optim.Adam,
        batch_size=ROWS,
        shards=2,
        devices="cpu",
        workers=2,
        engine=options.engine,
        run_dir=run_dir,
    )
    rates: dict[bool, list[float]] = {True: [], False: []}  # updates per second
    copies_s: list[float] = []
    state_bytes = 0
    saves, saver, began, updates = False, None, 0.0, 0
    try:
        for report in trainer.updates(data, steps=1_000_000):
            now = time.monotonic()
            if report.global_step <= 10:  # to warm up
                began, updates = now, 0
                continue
            updates += 1
            if saves:
                if saver is None:
                    saver = Checkpoints(run_dir, Policy(every_s=options.every_s, keep=2))
                if saver.is_due(report.global_step):
                    assert trainer._state is not None
                    contents = checkpoint.contents(
                        trainer._state, trainer._facts(trainer._state), saver.room
                    )
                    state_bytes = contents.nbytes
                    saver.save(contents)
                    del contents
                    copies_s.append(time.monotonic() - now)
                for outcome in saver.outcomes():
                    assert outcome.path is not None, outcome.error
            if now - began >= options.seconds:
                rates[saves].append(updates / (time.monotonic() - began))
                print(f"{'with' if saves else 'without'} saves: {rates[saves][-1]:.3f} updates/s")
                if saver is not None:
                    saver.close()
                    saver = None
                saves = not saves
                began, updates = time.monotonic(), 0
                if len(rates[True]) == options.rounds:
                    break
    finally:
        shutil.rmtree(run_dir)
    ratios = [w / wo for w, wo in zip(rates[True], rates[False], strict=False)]
    stall = 1 - statistics.median(ratios)
    print(f"state {state_bytes / 1e6:.0f} MB, a save every {options.every_s:g} s")
    print(f"stall: median {stall:.2%} of {[f'{1 - r:.2%}' for r in ratios]}")
    print(f"copy: median {statistics.median(copies_s) * 1e3:.0f} ms of {len(copies_s)} saves")


if __name__ == "__main__":
    main()
