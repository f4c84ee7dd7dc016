"""The meeting: a rank waits for all others, and sees meanwhile who will not come."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from quorate.engines.collective.failure_detector import SilenceLimits
from quorate.engines.collective.heartbeat import RankIdentity
from quorate.engines.collective.heartbeat_store import (
    FileHeartbeats,
    HeartbeatStore,
    StoreHeartbeats,
)
from quorate.engines.collective.liveness_monitor import LivenessMonitor
from quorate.engines.collective.rank_place import RankPlace
from quorate.errors import RankError
from quorate.machine import this_host
from quorate.machine.limits import FILE_POLL_S

_dist: Any = dist  # documented, and not declared to be exported


class Met(NamedTuple):
    """What a rank has when all are there."""

    watch: LivenessMonitor
    store: Any  # of torch.distributed, for these ranks alone


def meet(
    place: RankPlace, device: torch.device, timeout_s: float, ended: Callable[[], str | None]
) -> Met:
    """Return when all ranks are there. Blocks, but not in torch: signals are heard.

    Args:
        timeout_s: how long a rank may take for a shard; see ``SilenceLimits``.
        ended: says which rank that this process has started has ended, if one has.

    Raises:
        RankError: one does not come.
    """
    times = SilenceLimits.of(timeout_s)
    timeout = timedelta(seconds=times.most_s)
    store, _, _ = next(_dist.rendezvous(place.meet, place.rank, place.size, timeout=timeout))
    board: HeartbeatStore
    if place.board is None:
        where = place.where
        board = StoreHeartbeats(store, place.rank, place.size, times, where)
    else:
        board = FileHeartbeats(Path(place.board), place.rank, place.size)
    own = RankIdentity(place.rank, this_host.name(), this_host.mark(), os.getpid(), str(device))
    watch = LivenessMonitor(board, own, place.size, times, is_told=place.board is not None)
    try:
        _wait(watch, place, times.most_s, ended)
    except BaseException as error:
        watch.close(f"{type(error).__name__} while it waited for the others")
        raise
    return Met(watch, _dist.PrefixStore(f"quorate-{watch.session}", store))


def _wait(
    watch: LivenessMonitor, place: RankPlace, timeout_s: float, ended: Callable[[], str | None]
) -> None:
    until = time.monotonic() + timeout_s
    while missing := watch.missing():
        if watch.verdict is not None:
            raise RankError(watch.verdict.text)
        if (how := ended() or watch.farewell()) is not None:
            raise RankError(f"{how}, before all ranks had met")
        if time.monotonic() > until:
            which = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
            has_not = "has not" if len(missing) == 1 else "have not"
            raise RankError(
                f"rank {which} of {place.size} {has_not} come to the training loop in "
                f"{timeout_s:g} s",
                fix="start the same script on every rank, or turn worker_timeout_s up",
            )
        time.sleep(FILE_POLL_S)
