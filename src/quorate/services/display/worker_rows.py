"""The rows of the table of workers, and the table as plain lines."""

from __future__ import annotations

from collections.abc import Sequence

from quorate.engines.worker_status import WorkerStatus
from quorate.machine.text import aligned
from quorate.services.device_use import DeviceUse
from quorate.services.display.shard_time import duration, shard_time

COLUMNS = ("worker", "device", "use", "memory", "shard", "waiting", "state")
LONG = 3.0  # a state is long, and its duration shown, after so many shard times of the worker
LONG_UNKNOWN_S = 10.0  # the same threshold while the shard time is unknown
LEAST_LONG_S = 1.0

Row = tuple[str, ...]  # a cell for each of COLUMNS


class WorkerRows:
    """The rows of the table for successive statuses of all workers. One thread.

    Shard times and shares of time cover the time since the previous call.
    """

    def __init__(self) -> None:
        self._before: dict[int, WorkerStatus] = {}
        self._shard_s: dict[int, float] = {}  # the last known: there may be no new time

    def rows(
        self, workers: Sequence[WorkerStatus], uses: Sequence[DeviceUse], now: float
    ) -> list[Row]:
        """Return a row per worker.

        Args:
            now: time.monotonic().
        """
        use_of = {use.worker: use for use in uses}
        return [self._row(status, use_of.get(status.number), now) for status in workers]

    def _row(self, status: WorkerStatus, use: DeviceUse | None, now: float) -> Row:
        number = status.number
        time = shard_time(self._before.get(number), status)
        self._before[number] = status
        if time.shard_s is not None:
            self._shard_s[number] = time.shard_s
        shard_s = self._shard_s.get(number)
        return (
            str(number),
            _device(status, use),
            "" if use is None else _use(use),
            "" if use is None else _memory(use),
            "" if shard_s is None else duration(shard_s),
            "" if time.waiting is None else f"{time.waiting:.0%}",
            _state(status, shard_s, now),
        )


def plain(rows: Sequence[Row]) -> str:
    """Return the table for a file, as lines."""
    return aligned([COLUMNS, *rows])


def _state(status: WorkerStatus, shard_s: float | None, now: float) -> str:
    # A worker without a shard so far is starting: its process may exist without being known yet.
    phase = "gone" if status.is_gone and status.shards else status.phase
    long_s = LONG_UNKNOWN_S if shard_s is None else max(LEAST_LONG_S, LONG * shard_s)
    lasted_s = now - status.since
    return f"{phase} for {duration(lasted_s)}" if lasted_s > long_s else phase


def _device(status: WorkerStatus, use: DeviceUse | None) -> str:
    if use is None or use.physical is None:
        return status.where
    return f"{status.where} = {use.physical}"


def _use(use: DeviceUse) -> str:
    if use.use is None:
        return ""
    if use.device.startswith("cpu"):
        return f"{use.use:.1f} core{'' if 0.95 <= use.use < 1.05 else 's'}"
    return f"{use.use:.0%}"


def _memory(use: DeviceUse) -> str:
    if use.memory_bytes is None:
        return ""
    if use.memory_total_bytes is None:
        return f"{use.memory_bytes / (1 << 20):,.0f} MiB"
    gib = 1 << 30
    return f"{use.memory_bytes / gib:.1f} of {use.memory_total_bytes / gib:.0f} GiB"
