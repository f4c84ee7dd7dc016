"""Raised shards: user code raises on one worker, and others compute its shards. It is said."""

from __future__ import annotations

from collections import Counter

from quorate.coordination.run_event import WARNING, RunEvent


class RaisedShards:
    """Names workers on which user code raises, though the run goes on. One thread."""

    def __init__(self) -> None:
        self._counts = Counter[int]()  # shards by worker
        self._last: dict[int, str] = {}

    def named(self, worker: int, step: int, shard: int, error: BaseException) -> str | None:
        """Return the line to show about a shard that a worker raised in: its first one."""
        text = str(error).partition("\n")[0][:200]
        self._last[worker] = f"{type(error).__name__}: {text}" if text else type(error).__name__
        self._counts[worker] += 1
        if self._counts[worker] > 1:
            return None
        at = f"step {step}, shard {shard}"
        line = f"worker {worker} raised {self._last[worker]} in {at}; another computes it"
        return RunEvent(line, WARNING, worker)

    def summary(self) -> list[str]:
        """Return the lines to show at the end of the run."""
        return [
            f"worker {worker} raised in {count:,} shard{'s' * (count > 1)}, which others computed; "
            f"the last was {self._last[worker]}: it is not as the others are"
            for worker, count in sorted(self._counts.items())
        ]
