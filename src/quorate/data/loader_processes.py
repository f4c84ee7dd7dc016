"""Loader processes: what they need before the first step, and what runs in them.

They hand over rows by way of sockets in the temporary folder and of segments of shared memory in
/dev/shm. Where either fails, torch's loader prints an error of a thread and hands over nothing, and
whoever waits for those rows waits for ever: so both are looked at before the first step.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Generator, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from quorate.data.source import Batch, Source, Ticket
from quorate.errors import UserError
from quorate.machine.dies_with_parent import JOB_SIGNALS, die_with
from quorate.machine.temporary_folder import require_short_path
from quorate.replica.nested import tensors

SHM = Path("/dev/shm")
MIB = 1 << 20
_PREFETCHED = 2  # batches of each loader process: torch's default


def check_loader_processes() -> None:
    """Refuse a temporary folder in which loader processes cannot hand over what they loaded.

    Raises:
        SettingError: its path is too long for a socket's name.
    """
    strategy = torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
    if strategy == "file_descriptor":
        require_short_path()


def require_loader_memory(
    batch: Any, *, shards: int, loader_workers: int, feeds: int, shm: Path = SHM
) -> None:
    """Compare what loader processes will hand over with what is free.

    Args:
        batch: the rows of one shard.
        shards: V; two steps' worth of them is held ready.
        loader_workers: processes of each feed.
        feeds: one for all towers, or one in each worker process.

    Raises:
        UserError: there is not enough; it names both figures.
    """
    if not shm.is_dir():  # not on this system
        return
    file_system = os.statvfs(shm)
    free = file_system.f_bavail * file_system.f_frsize
    batches = _PREFETCHED * loader_workers * feeds + 2 * max(shards, feeds)
    if batches * (nbytes := sum(t.nbytes for t in tensors(batch))) > free:
        raise UserError(
            f"shared memory: loader_workers={loader_workers} hand over up to {batches} shards of "
            f"{nbytes / MIB:,.1f} MiB in {shm}, and {free / MIB:,.1f} MiB are free; make it larger "
            "(docker --shm-size 8g, or mount -o remount,size=8g /dev/shm), more shards, fewer "
            "loader_workers, or loader_workers=0"
        )


def load_all(
    source: Source, tickets: Iterable[Ticket], loader_workers: int, threads: int
) -> Generator[tuple[Ticket, Batch | None]]:
    """Load one ticket after the other; None where the dataset raised.

    Processes start before this returns, in the thread that calls it.

    Args:
        loader_workers: how many processes load; 0 is the thread that iterates.
        threads: intra-op threads of each process.
    """
    attempt = _Attempt(source)
    if not loader_workers:
        return (attempt[ticket] for ticket in tickets)
    loader = DataLoader(
        attempt,
        sampler=tickets,
        batch_size=None,
        collate_fn=_as_it_is,
        num_workers=loader_workers,
        worker_init_fn=partial(_begin_process, threads),
        generator=torch.Generator(),  # else the process-wide one is drawn from
    )
    iterator = iter(loader)
    return (load for load in iterator)


class _Attempt(Dataset[tuple[Ticket, "Batch | None"]]):
    def __init__(self, source: Source) -> None:
        self._source = source

    def __getitem__(self, ticket: Ticket) -> tuple[Ticket, Batch | None]:
        try:
            return ticket, self._source.load(ticket)
        except Exception:  # the edge of a thread or process: take() loads it again and raises
            return ticket, None


def _as_it_is(load: Any) -> Any:
    return load


def _begin_process(threads: int, _worker: int) -> None:
    # Not by SIGKILL: torch passes batches on in segments that have a name for a moment, and a kill
    # then would leave one behind. Python handles a signal when the call is over.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(1))
    die_with(os.getppid(), signal.SIGTERM)
    for number in set(JOB_SIGNALS) - {signal.SIGTERM}:
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(threads)
