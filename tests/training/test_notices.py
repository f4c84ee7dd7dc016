"""A script with several fits says what is the same of each of them once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import quorate

ROWS = TensorDataset(torch.randn(16, 3, generator=torch.Generator().manual_seed(0)))


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return model(batch[0]).square().mean()


def fitted(capsys: pytest.CaptureFixture[str], data: object = ROWS, workers: int = 2) -> list[str]:
    """What a new trainer says of a fit, but for its updates."""
    trainer = quorate.Trainer(
        lambda: nn.Linear(3, 1),
        loss,
        optimizer=torch.optim.Adam,
        batch_size=8,
        workers=quorate.Workers(workers, engine="towers"),
        devices="cpu",
    )
    trainer.fit(data, epochs=1)
    lines = capsys.readouterr().out.splitlines()
    return [line for line in lines if not line.startswith(("epoch ", "slow workers"))]


def test_each_notice_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    fix = "pass shards=2 for the same bits on any number of workers"
    fix = f"; no shards given, so 2, as many as workers: {fix}"
    first, *others = fitted(capsys)
    assert first.endswith(f", sync{fix}")
    assert fitted(capsys) == [first.removesuffix(fix)]  # each fit says what it does
    # What is new is said: of a loader, of another number of workers.
    head, *loaded = fitted(capsys, DataLoader(ROWS, batch_size=8, shuffle=True))
    assert head == first.removesuffix(fix)
    assert len(loaded) == 1
    assert fitted(capsys, DataLoader(ROWS, batch_size=8, shuffle=True)) == [head]
    assert "; no shards given, so 1, as many as workers: " in fitted(capsys, workers=1)[0]
    assert others == []


def test_each_run_directory_logs_the_notices_of_its_fit(tmp_path: Path) -> None:
    logged = []
    for fold in ("a", "b"):
        quorate.Trainer(
            lambda: nn.Linear(3, 1),
            loss,
            optimizer=torch.optim.Adam,
            batch_size=8,
            shards=2,
            devices="cpu",
            run_dir=tmp_path / fold,
        ).fit(DataLoader(ROWS, batch_size=8), epochs=1)
        lines = (tmp_path / fold / "events.jsonl").read_text().splitlines()
        texts = [json.loads(line)["text"] for line in lines]
        logged.append([text for text in texts if "is a DataLoader" in text])
    assert len(logged[0]) == 1
    assert logged[1] == logged[0]
