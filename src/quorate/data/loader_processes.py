"""The shared memory in which loader processes hand over rows: /dev/shm.

Where it is full, torch's loader prints an error of a thread and hands over nothing, and whoever
waits for those rows waits for ever: so it is looked at before the first step.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from quorate.errors import UserError
from quorate.replica.nested import tensors

SHM = Path("/dev/shm")
MIB = 1 << 20
_PREFETCHED = 2  # batches of each loader process: torch's default


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
    found = os.statvfs(shm)
    free, each = found.f_bavail * found.f_frsize, sum(t.nbytes for t in tensors(batch))
    batches = _PREFETCHED * loader_workers * feeds + 2 * max(shards, feeds)
    if batches * each > free:
        raise UserError(
            f"shared memory: loader_workers={loader_workers} hand over up to {batches} shards of "
            f"{each / MIB:,.1f} MiB in {shm}, and {free / MIB:,.1f} MiB are free; make it larger "
            "(docker --shm-size 8g, or mount -o remount,size=8g /dev/shm), more shards, fewer "
            "loader_workers, or loader_workers=0"
        )
