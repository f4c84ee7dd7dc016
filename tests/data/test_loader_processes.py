"""Loader processes: in order, the same bits, and gone whatever happens to them or their parent."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import closing
from typing import Any

import pytest
import torch
from support.few_descriptors import no_descriptor_left
from torch.utils.data import Dataset

from quorate.coordination.plan import Plan
from quorate.data.feed import Feed
from quorate.data.loader_processes import LoaderProcesses
from quorate.data.source import Source

TICKETS = [(step, shard) for step in range(10) for shard in range(4)]


class Noisy(Dataset[Any]):
    """Rows of random numbers; some rows do something beside."""

    def __init__(self, does: dict[int, Any] | None = None) -> None:
        self.does = does or {}

    def __len__(self) -> int:
        return 80

    def __getitem__(self, row: int) -> Any:
        if row in self.does:
            self.does[row]()
        return torch.randn(3, 5) + row, row


def source(does: dict[int, Any] | None = None, **given: Any) -> Source:
    return Source(
        Noisy(does), Plan(rows=80, batch_size=8, shards=4, seed=0, shuffle=False), **given
    )


def taken(rows: Source, loader_workers: int) -> list[Any]:
    with closing(Feed(rows, TICKETS, ahead=8, loader_workers=loader_workers)) as feed:
        return [feed.take(ticket).data for ticket in TICKETS]


def same(one: list[Any], other: list[Any]) -> bool:
    return all(
        torch.equal(a, b)
        for x, y in zip(one, other, strict=True)
        for a, b in zip(x, y, strict=True)
    )


def test_they_load_what_a_thread_would() -> None:
    assert same(taken(source(), 0), taken(source(), 3))


@pytest.mark.parametrize("how", ["was killed by signal 9", "ended"])
def test_one_that_ends_takes_nothing_along(how: str, capfd: pytest.CaptureFixture[str]) -> None:
    expected, here = taken(source(), 0), os.getpid()

    def end() -> None:
        if os.getpid() != here:
            if how == "ended":
                os._exit(3)
            os.kill(os.getpid(), signal.SIGKILL)

    assert same(expected, taken(source({33: end}), 2))
    said = capfd.readouterr().err
    assert f"{how}; the workers load the rows themselves" in said
    assert said.count("quorate: ") == 1


def test_what_cannot_be_handed_over_is_loaded_by_the_workers(
    capfd: pytest.CaptureFixture[str],
) -> None:
    rows = source(collate=lambda samples: [lambda: samples])
    for made in taken(rows, 2):
        assert len(made[0]()) == 2
    said = capfd.readouterr().err
    assert said.count("a loader process cannot send rows of this dataset (") == 1
    assert "lambda" in said


class Sealed:
    """Part of a batch that raises in the process that it is sent to."""

    def __reduce__(self) -> Any:
        return opened_in, (os.getpid(),)


def opened_in(pid: int) -> Sealed:
    if pid != os.getpid():
        raise ZeroDivisionError("it can be opened in one process alone")
    return Sealed()


def test_what_cannot_be_made_anew_is_loaded_by_the_workers(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """And what comes after it is loaded ahead still."""

    def collate(samples: list[Any]) -> Any:
        return [Sealed() if samples[0][1] == 4 else 0, samples]

    with closing(LoaderProcesses(source(collate=collate), iter(TICKETS), 2, threads=1)) as loads:
        none = [ticket for ticket, batch in loads if batch is None]
    assert none == [TICKETS[2]]
    assert "(ZeroDivisionError: it can be opened in one process alone)" in capfd.readouterr().err


def test_batches_that_cannot_be_taken_end_no_thread(capfd: pytest.CaptureFixture[str]) -> None:
    """With no descriptor left for their memory nobody waits: who needs a batch loads it."""
    expected = source(collate=lambda samples: torch.zeros(1 << 20) + samples[0][1])
    with closing(Feed(expected, TICKETS, ahead=2, loader_workers=1)) as feed, no_descriptor_left():
        for number, ticket in enumerate(TICKETS):
            assert feed.take(ticket).data[0] == 2 * number
    assert capfd.readouterr().err.count("the workers load the rows themselves") == 1


def test_what_is_sent_is_not_copied_before() -> None:
    held = torch.zeros(4)
    rows = source(collate=lambda _: held)
    assert rows.load(TICKETS[0]).data is not held  # a loss may write to its batch
    rows.is_sent = True
    assert rows.load(TICKETS[0]).data is held


def test_a_signal_to_the_whole_job_is_not_theirs() -> None:
    loads = LoaderProcesses(source(), iter(TICKETS), 2, threads=1)
    with closing(loads):
        iterator = iter(loads)
        for process in loads._processes:
            assert process._process.pid is not None
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
                os.kill(process._process.pid, number)
        assert [ticket for ticket, batch in iterator if batch is not None] == TICKETS


@pytest.mark.parametrize("how", ["stopped", "stuck"])
def test_closing_does_not_wait_for_ever(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quorate.data.loader_processes.GRACE_S", 0.3)
    does = {0: lambda: time.sleep(1000)} if how == "stuck" else {}
    loads = LoaderProcesses(source(does), iter(TICKETS), 1, threads=1)
    if how == "stopped":
        assert loads._processes[0]._process.pid is not None
        os.kill(loads._processes[0]._process.pid, signal.SIGSTOP)
    got: list[Any] = []
    waiting = threading.Thread(target=lambda: got.append(next(iter(loads))))
    waiting.start()
    time.sleep(0.1)
    loads.end()
    waiting.join(timeout=60)
    assert got == [((0, 0), None)]
    began = time.monotonic()
    loads.close()
    assert time.monotonic() - began < 60  # of 1000


def test_they_need_no_folder_and_no_file(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("x" * 200)))  # none, and far too long
    assert same(taken(source(), 0), taken(source(), 2))
