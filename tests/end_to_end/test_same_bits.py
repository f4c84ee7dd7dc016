"""The promise: one digest on any number of devices, after a resume, and whoever is slow."""

from __future__ import annotations

import json
import random
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.digests import digest_of
from support.everything import EVERYTHING, digest_on_one_tower, trained
from support.references import References
from support.runs import command, inspected, run
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, TensorDataset

import quorate
from quorate.replica.digest import digest


@pytest.mark.parametrize("shards", [1, 4, 5, pytest.param(8, marks=pytest.mark.slow)])
def test_one_digest_on_any_number_of_towers(shards: int, references: References) -> None:
    expected = digest_on_one_tower(references, shards)
    for workers in (2, 3, 4, 9):
        assert digest_of(trained(workers, shards)) == expected, workers


def test_the_digest_depends_on_seed_and_shards(references: References) -> None:
    digests = {digest_on_one_tower(references, shards) for shards in (4, 5)}
    digests |= {digest_of(trained(2, shards, seed=1)) for shards in (4, 5)}
    assert len(digests) == 4


@pytest.mark.slow
def test_more_threads_per_worker_are_another_result_on_any_number_of_workers() -> None:
    assert digest_of(trained(1, 4, threads=2)) == digest_of(trained(3, 4, threads=2))


def test_loader_processes_do_not_change_a_bit(references: References) -> None:
    assert digest_of(trained(2, 4, loader_workers=2)) == digest_on_one_tower(references, 4)


@pytest.mark.slow
def test_slow_towers_do_not_change_a_bit() -> None:
    """Random sleeps make idle towers take over shards and compute copies of them."""

    def sleepy(model: nn.Module, batch: Any) -> Any:
        if torch.is_grad_enabled() and time.monotonic_ns() // 1000 % 5 == 0:
            time.sleep(0.05)
        return EVERYTHING.loss(model, batch)

    def run(workers: int, loss: Any) -> str:
        torch.manual_seed(3)
        trainer = quorate.Trainer(
            EVERYTHING.Everything(),
            loss,
            optimizer=quorate.Optimize(torch.optim.Adam, ema_decay=0.9),
            batch_size=24,
            shards=6,
            devices="cpu",
            workers=workers,
        )
        for report in trainer.updates(EVERYTHING.Sentences(72), epochs=4):
            if report.ends_epoch:
                trainer.evaluate(EVERYTHING.Sentences(30))
        return digest_of(trainer)

    expected = run(1, EVERYTHING.loss)
    assert {run(workers, sleepy) for workers in (2, 3, 7)} == {expected}


class Careless(nn.Module):
    """Draws from the generators that all threads share, and recomputes activations."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.second = nn.Linear(16, 1)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * random.uniform(0.5, 1.5) + np.random.normal()
        hidden = checkpoint(
            lambda y: self.dropout(torch.relu(self.first(y))), x, use_reentrant=False
        )
        return self.second(hidden)


def test_models_that_draw_from_shared_generators_take_turns() -> None:
    data = TensorDataset(torch.randn(64, 6, generator=torch.Generator().manual_seed(0)))

    def run(workers: int) -> str:
        trainer = quorate.Trainer(
            Careless,
            lambda model, batch: model(batch[0]).square().mean(),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
            batch_size=16,
            shards=4,
            devices="cpu",
            workers=workers,
        )
        for _ in trainer.updates(data, epochs=4):
            random.random()  # the caller's own draws are neither disturbed nor disturbing
            np.random.rand()
        return digest(trainer.model.state_dict().items())

    assert len({run(workers) for workers in (1, 2, 3, 4)}) == 1


def test_the_callers_generators_are_left_alone() -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    expected = random.random(), np.random.rand(), torch.rand(1).item()
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    trainer = quorate.Trainer(
        Careless,
        lambda model, batch: model(batch[0]).square().mean(),
        optimizer=torch.optim.Adam,
        batch_size=16,
        shards=4,
        devices="cpu",
        workers=2,
    )
    for _ in trainer.updates(TensorDataset(torch.ones(64, 6))):
        pass
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == expected


class ByIndex(Dataset[torch.Tensor]):
    """Augmented rows; `together` also offers several at once."""

    def __init__(self, together: bool) -> None:
        self.rows = torch.arange(48.0).reshape(48, 1)
        if together:
            self.__getitems__ = lambda rows: [self[row] for row in rows]

    def __len__(self) -> int:
        return 48

    def __getitem__(self, row: int) -> torch.Tensor:
        return self.rows[row] + torch.randn(1)


@pytest.mark.parametrize("together", [False, True])
def test_augmentation_belongs_to_the_sample_and_the_epoch(together: bool) -> None:
    """Whatever the shards, batches and workers: one noise per row, another in each epoch."""

    def seen(batch_size: int, shards: int, workers: int, loader_workers: int) -> list[float]:
        values: set[float] = set()

        def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            values.update(round(float(v), 6) for v in batch.flatten())
            return model(batch).mean()

        trainer = quorate.Trainer(
            nn.Linear(1, 1),
            loss,
            optimizer=torch.optim.SGD,
            batch_size=batch_size,
            shards=shards,
            devices="cpu",
            workers=workers,
            loading=quorate.Loading(processes=loader_workers),
        )
        for _ in trainer.updates(ByIndex(together), epochs=2):
            pass
        return sorted(values)

    expected = seen(8, 1, 1, 0)
    assert len(expected) == 2 * 48  # each row once per epoch, with another noise
    for other in [(8, 4, 2, 0), (16, 3, 3, 0), (48, 5, 2, 1)]:
        assert seen(*other) == expected, other


def test_the_command_line_shows_one_digest(tmp_path: Path, references: References) -> None:
    one = references.on_a_tower("everything.py", options=("--shards", "5")).facts
    options = ("--workers", "3", "--shards", "5", "--run-dir", str(tmp_path / "three"))
    ended = run(command("everything.py", options=options))
    assert ended.code == 0, ended.said
    three = inspected(tmp_path / "three")
    assert one["digest"] == three["digest"]
    assert one["averaged_digest"] == three["averaged_digest"] != one["digest"]
    assert (one["global_step"], one["epoch"], one["shards"], one["update"]) == (15, 3, 5, "sync")
    assert (one["workers"], three["workers"], three["devices"]) == (1, 3, ["cpu"])
    log = (tmp_path / "three/metrics.jsonl").read_text()
    lines = [json.loads(line) for line in log.splitlines()]
    updates = [line for line in lines if "loss" in line]
    assert [line["global_step"] for line in updates] == list(range(1, 16))
    assert [line["rows"] for line in updates[:5]] == [24, 24, 24, 24, 14]
    assert len([line for line in lines if "validation" in line]) == 3


def test_autocast_gives_the_same_bits_on_any_number_of_towers() -> None:
    """Its cache of cast weights is shared by all threads, and would make them differ."""

    class Repeats(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                for _ in range(12):
                    x = torch.tanh(self.linear(x))
            return x.float()

    data = TensorDataset(torch.randn(64, 32, generator=torch.Generator().manual_seed(0)))

    def run(workers: int) -> str:
        trainer = quorate.Trainer(
            Repeats,
            lambda model, batch: model(batch[0]).square().mean(),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
            batch_size=32,
            shards=4,
            devices="cpu",
            workers=workers,
        )
        for _ in trainer.updates(data, epochs=15):
            pass
        return digest(trainer.model.state_dict().items())

    assert len({run(workers) for workers in (1, 2, 2, 3)}) == 1


def test_a_worker_that_holds_shards_and_is_stuck_in_a_copy_keeps_nobody_waiting() -> None:
    """The update takes what it holds without waiting for what it computes."""
    release, stuck = threading.Event(), threading.Event()

    def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        if trainer.global_step == 3 and batch[0].max() == 1 and not stuck.is_set():
            stuck.set()
            release.wait(timeout=60)
        else:
            time.sleep(0.02)
        return model(batch[0]).square().mean()

    x = torch.zeros(32, 1)
    x[3::4] = 1.0  # in the last shard of each step
    trainer = quorate.Trainer(
        nn.Linear(1, 1),
        loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        batch_size=4,
        shards=4,
        devices="cpu",
        workers=2,
    )
    steps = []
    for report in trainer.updates(TensorDataset(x), shuffle=False):
        steps.append(report.global_step)
        if stuck.is_set() and report.global_step == 6:
            release.set()
    assert stuck.is_set()
    assert steps == list(range(1, 9))


def test_one_loop_at_a_time() -> None:
    trainer = quorate.Trainer(
        nn.Linear(1, 1),
        lambda model, batch: model(batch[0]).mean(),
        optimizer=torch.optim.SGD,
        batch_size=4,
        devices="cpu",
    )
    data = TensorDataset(torch.rand(16, 1))
    first = trainer.updates(data)
    next(first)
    with pytest.raises(quorate.UserError, match="updates"):
        next(trainer.updates(data))
    first.close()
    assert [report.global_step for report in trainer.updates(data)] == [2, 3, 4]
