"""Raised shards: exceptions of user code on a worker, whose shards other workers compute."""

from __future__ import annotations

from collections import Counter

from quorate.coordination.run_event import WARNING, RunEvent


class RaisedShards:
    """The warnings about workers on which user code raises while the run goes on. One thread."""

    def __init__(self) -> None:
        self._counts = Counter[int]()  # number of shards by worker
        self._last: dict[int, str] = {}

    def named(self, worker: int, where: str, error: BaseException) -> str | None:
        """Return the warning about a shard whose computation raised; None after a worker's first.

        Args:
            where: the shard in words: "step 7, shard 3".
        """
        text = str(error).partition("\n")[0][:200]
        self._last[worker] = f"{type(error).__name__}: {text}" if text else type(error).__name__
        self._counts[worker] += 1
        if self._counts[worker] > 1:
            return None
        line = f"worker {worker} raised {self._last[worker]} in {where}; another worker computes it"
        return RunEvent(line, WARNING, worker)

    def summary(self, job: str) -> list[str]:
        """Return the lines to show at the end.

        Args:
            job: the purpose of the shards: "training", "validation".
        """
        return [
            f"worker {worker} raised in {count:,} shard{'s' * (count > 1)} of {job}, which other "
            f"workers computed; the last error was {self._last[worker]}; look for what is "
            f"different on worker {worker}"
            for worker, count in sorted(self._counts.items())
        ]
