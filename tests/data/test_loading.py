"""Loading: each row once, with the same bits and layout, whoever loads, and whatever fails."""

import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.digests import digest
from support.fits import DEFAULTS, fit, sgd
from support.front_door import trainer
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import quorate

ROWS = 60


def line() -> nn.Module:
    return nn.Linear(1, 1)


def of_x(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch[0].reshape(-1, 1).float() / ROWS).square().mean()


class Numbers(Dataset[Any]):
    """Rows of random numbers and their numbers; some rows do something beside."""

    def __init__(self, does: dict[int, Callable[[], Any]] | None = None, count: int = ROWS) -> None:
        self.does = does or {}
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, row: int) -> Any:
        self.does.get(row, int)()
        return torch.rand(()) + row, row


class Together(Numbers):
    """Rows requested together."""

    def __getitems__(self, rows: list[int]) -> list[Any]:
        asked.append(len(rows))
        return [self[row] for row in rows]


asked: list[int] = []


def seen_in(data: Any, **settings: Any) -> tuple[Counter[int], str]:
    """Return how often each row was in an update, and the digest."""
    rows: Counter[int] = Counter()

    def loss(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        counts = torch.bincount(batch[1], minlength=ROWS)
        return {"loss": of_x(model, batch), "rows": counts}

    class Count(quorate.Callback):
        def updated(self, report: quorate.Report) -> None:
            rows.update(dict(enumerate(report.totals["rows"].int().tolist())))

    totals = {"rows": lambda total: float(total.sum())}
    run = fit(line, loss, data, epochs=2, totals=totals, callbacks=[Count()], **settings)
    return rows, digest(run.model.state_dict().items())


WAYS: list[dict[str, Any]] = [
    {"workers": 1},
    {"workers": 3},
    {"workers": 2, "loader_workers": 1},
    {"workers": 1, "loader_workers": 3},
]


@pytest.mark.parametrize("kind", [Numbers, Together])
def test_each_row_is_in_an_epoch_once_with_the_same_bits_whoever_loads(
    kind: type[Numbers], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("x" * 200)))  # none, and far too long
    found = [seen_in(kind(), **way) for way in WAYS]
    assert {digest for _, digest in found} == {found[0][1]}
    assert all(rows == Counter(dict.fromkeys(range(ROWS), 2)) for rows, _ in found)
    assert kind is Numbers or set(asked) == {3}  # a shard's


@pytest.mark.parametrize(("batch_size", "workers"), [(16, 1), (13, 2)])
def test_tensors_are_taken_as_by_indexing(batch_size: int, workers: int) -> None:
    """Rows have the same dtype and layout, at a multiple of 64 bytes, and equal collated rows."""
    channels = torch.randn(50, 3, 8, 8)
    tensors = [
        torch.arange(50),
        channels,
        channels.contiguous(memory_format=torch.channels_last),
        torch.randn(8, 50).t(),
        torch.randn(50, 8, requires_grad=True),
        torch.randn(50, 8, dtype=torch.complex64),
        torch.rand(50) < 0.5,
        torch.randn(50, 4).bfloat16(),
        torch.randn(50, 0),
    ]
    checked = 0

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        nonlocal checked
        for rows_of, tensor in zip(batch, tensors, strict=True):
            expected = tensor[batch[0]]
            assert rows_of.equal(expected)
            assert (rows_of.dtype, rows_of.stride()) == (expected.dtype, expected.stride())
            assert rows_of.requires_grad is expected.requires_grad
            assert not rows_of.numel() or rows_of.data_ptr() % 64 == 0
        checked += 1
        return of_x(model, batch)

    fit(line, loss, TensorDataset(*tensors), epochs=1, batch_size=batch_size, shards=4,
        workers=workers)  # fmt: skip
    assert checked >= 4 * 4
    plain = TensorDataset(torch.arange(60), torch.arange(60.0))
    runs = [fit(line, of_x, data) for data in (plain, list(plain))]
    assert len({digest(run.model.state_dict().items()) for run in runs}) == 1


LARGE = torch.arange(3_000_000, dtype=torch.float32)
MADE: dict[str, Callable[[torch.Tensor], Any]] = {
    "large": lambda _: LARGE.clone(),
    "empty": lambda _: torch.empty(0, 3),
    "half": lambda rows: rows.to(torch.bfloat16),
    "channels last": lambda rows: torch.zeros(len(rows), 3, 4, 5).contiguous(
        memory_format=torch.channels_last
    ),
    "transposed": lambda rows: torch.stack([rows, rows]).t(),
    "columns of a large one": lambda rows: LARGE.view(3000, 1000)[: len(rows), 3:7],
    "leaf with a gradient": lambda rows: rows.float().requires_grad_(),
    "array": lambda _: np.arange(12.0).reshape(3, 4)[:, ::2],
    "else": lambda rows: [len(rows), None, "é", b"x" * 9],
}


@pytest.mark.parametrize("kind", MADE)
def test_what_comes_out_of_a_loader_process_is_what_went_in(kind: str) -> None:
    make, loaders = MADE[kind], set[int]()

    def collate(samples: list[Any]) -> Any:
        rows = torch.tensor([row for _, row in samples])
        return rows, make(rows), os.getpid()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        rows, found, pid = batch
        expected = make(rows)
        if pid == os.getpid():  # a copy, for a loss with writes to the rows
            return of_x(model, batch)
        if isinstance(found, torch.Tensor):
            assert torch.equal(found, expected)
            assert (found.dtype, found.stride()) == (expected.dtype, expected.stride())
            assert found.requires_grad == expected.requires_grad
            assert not found.numel() or found.data_ptr() % 64 == expected.data_ptr() % 64
            assert kind == "large" or found.untyped_storage().nbytes() < 100_000
        elif isinstance(found, np.ndarray):
            assert np.array_equal(found, expected)
            assert found.flags.writeable
        else:
            assert found == expected
        loaders.add(pid)
        return of_x(model, batch)

    fit(line, loss, Numbers(), steps=2, collate=collate, loader_workers=1)
    assert loaders  # some were loaded there


def test_a_loss_may_write_to_its_batch_and_parts_share_memory_still() -> None:
    held = torch.ones(8)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        whole, part, array, pid = batch
        assert whole.tolist() + array.tolist() == [1.0] * 12
        whole.zero_()
        array[:] = 0.0
        assert pid == os.getpid() or part.tolist() == [0.0] * 4
        return of_x(model, batch)

    for loaders in (0, 1):
        array = np.ones(4)
        fit(line, loss, Numbers(), steps=3, loader_workers=loaders,
            collate=lambda _, array=array: (held, held[4:], array, os.getpid()))  # fmt: skip
    assert held.tolist() == [1.0] * 8


# --- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("loaders", [0, 1])
def test_what_a_dataset_raises_reaches_the_caller_with_the_row(loaders: int) -> None:
    class UnpicklableError(KeyError):
        def __init__(self, text: str) -> None:
            super().__init__(text)
            self.lock = lambda: None

    def fail() -> None:
        raise UnpicklableError("no such image")

    with pytest.raises(KeyError, match="no such image") as caught:
        fit(line, of_x, Numbers({17: fail}), epochs=1, workers=2, loader_workers=loaders)
    assert any("while loading row 17" in note for note in caught.value.__notes__)


@pytest.mark.parametrize(
    ("part", "why"),
    [
        (lambda _: lambda: 0, "lambda"),
        (lambda x: x.requires_grad_() * 2, "a tensor that was computed from others, with"),
    ],
    ids=["function", "graph"],
)
def test_what_cannot_be_sent_is_loaded_by_the_workers_and_the_next_one_comes(
    part: Any, why: str, capfd: pytest.CaptureFixture[str]
) -> None:
    pids: set[int] = set()

    def collate(samples: list[Any]) -> Any:
        x = torch.stack([x for x, _ in samples])
        return x, part(x) if any(row == 17 for _, row in samples) else 0, os.getpid()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        pids.add(batch[2])
        return of_x(model, batch)

    fit(line, loss, Numbers(), epochs=2, collate=collate, loader_workers=1)
    said = capfd.readouterr().err
    assert said.count("a loader process cannot send rows of this dataset (") == 1
    assert why in said
    assert len(pids) > 1


@pytest.mark.slow
def test_closing_does_not_wait_for_ever() -> None:
    data = Numbers(count=400)
    run = trainer(line, of_x, **DEFAULTS, optimizer=sgd, workers=2, loader_workers=1)
    updates = run.updates(data, epochs=1, shuffle=False)
    next(updates)
    for process in multiprocessing.active_children():
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
    began = time.monotonic()
    updates.close()
    while multiprocessing.active_children():
        assert time.monotonic() - began < 60
        time.sleep(0.05)


def test_rows_are_loaded_ahead_and_not_too_far() -> None:
    loaded: list[int] = []

    def note() -> None:
        time.sleep(0.002)
        loaded.append(0)

    data = Numbers(dict.fromkeys(range(2000), note), count=2000)
    run = trainer(line, of_x, **DEFAULTS, optimizer=sgd, workers=1)
    with closing(run.updates(data, steps=200)) as updates:
        next(updates)
        until, before = time.monotonic() + 60, -1
        while before != len(loaded) and time.monotonic() < until:
            before = len(loaded)
            time.sleep(0.2)
        assert 24 < before < 200
