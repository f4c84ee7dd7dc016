"""What saving costs: a state of 200 MB, saved every 10 s in the background, on two workers.

    python benchmarks/saving.py [--pairs 20] [--seconds 10] [--engine processes]

Windows of training with a save and without one take turns in one run. Stall: the share by which a
window with a save makes fewer updates than its neighbour. Copy: what the loop itself waits for.
Writer: the core's time that its thread takes, a bound for what it can take from workers.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import nn
from torch.utils.data import TensorDataset

import quorate
from quorate.engines import Transport
from quorate.services.checkpoints.saver import StateSaver
from quorate.services.run_directory.settings import RunDir
from quorate.training.observer import observing
from quorate.training.state import State

if TYPE_CHECKING:
    from quorate.training.observer import Observe
from quorate.training.saved_state import contents

WIDTH, LAYERS, ROWS = 2048, 4, 64


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each window")
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
        workers=quorate.Workers(2, engine=options.engine),
        run_dir=run_dir,
    )
    seen: list[tuple[State, dict[str, Any]]] = []

    def look(transport: Transport, state: State, facts: Mapping[str, Any]) -> Transport:
        seen.append((state, dict(facts)))
        return transport

    rates: dict[bool, list[float]] = {True: [], False: []}  # updates per second
    copies_s: list[float] = []
    state_bytes = 0
    saver = StateSaver(run_dir, RunDir(save_every_s=None, keep=2))
    began, updates, window = 0.0, 0, -1
    updating = observed_updates(trainer, data, look)
    try:
        for report in updating:
            now = time.monotonic()
            updates += 1
            if window < 0:
                if report.global_step < 10:  # to warm up
                    continue
            elif now - began < options.seconds:
                continue
            else:
                rates[_saves(window)].append(updates / (now - began))
                for outcome in saver.outcomes():
                    assert outcome.path is not None, outcome.error
            window += 1
            began, updates = time.monotonic(), 0
            if window == 2 * options.pairs:
                break
            if _saves(window):
                copied = contents(*seen[0], saver.spare)
                state_bytes = copied.nbytes
                saver.save(copied)
                del copied
                copies_s.append(time.monotonic() - began)
    finally:
        writer_s = _writer_s()
        saver.close()
        shutil.rmtree(run_dir)
    stalls = [1 - w / wo for w, wo in zip(rates[True], rates[False], strict=True)]
    low, middle, high = statistics.quantiles(stalls)
    mean, error = statistics.mean(stalls), statistics.stdev(stalls) / len(stalls) ** 0.5
    print(f"state {state_bytes / 1e6:.0f} MB, one save per {options.seconds:g} s")
    print(f"stall: mean {mean:.2%} +- {error:.2%}, quartiles {low:.2%} {middle:.2%} {high:.2%}")
    print(f"writer: {writer_s / len(copies_s):.2f} s of a core per save")
    print(f"copy: median {statistics.median(copies_s) * 1e3:.0f} ms of {len(copies_s)} saves")


def observed_updates(
    trainer: quorate.Trainer, data: TensorDataset, look: Observe
) -> Iterator[quorate.Report]:
    """The updates of a loop whose state is looked at."""
    with observing(look):
        yield from trainer.updates(data, steps=1_000_000)


def _writer_s() -> float:
    """Seconds of a core that the thread which writes has used so far."""
    ids = {t.native_id for t in threading.enumerate() if t.name.startswith("quorate-checkpoints")}
    threads = psutil.Process().threads()
    return sum(t.user_time + t.system_time for t in threads if t.id in ids)


def _saves(window: int) -> bool:
    return window % 4 in (1, 2)  # without, with, with, without: a steady drift hits both alike


if __name__ == "__main__":
    main()
