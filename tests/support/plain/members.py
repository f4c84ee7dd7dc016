"""Members, plainly: see ``quorate.coordination.members``."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from statistics import median

RECENT = 15  # shards that a worker's usual time is the median of


@dataclass
class Task:
    """A shard that a worker computes, or a run of them."""

    step: int
    shard: int  # the first
    version: int
    since: float
    count: int = 1
    is_lost: bool = False  # in no update, and counted as such: the worker may have been told so

    @cached_property
    def shards(self) -> range:
        """All of them."""
        return range(self.shard, self.shard + self.count)


@dataclass
class Member:
    """One life of a worker, from ``Joined`` to ``Left``."""

    task: Task | None = None
    place: str = ""  # where it is: those of one place are neighbours; "" is the coordinator's own
    rank_of: tuple[int, int] = (0, 1)  # (rank, number of workers)
    is_replaced: bool = False  # it is being ended: it may report still, and gets nothing more
    times_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    usual_s: float | None = None  # their median; None before the first shard is done

    def learn(self, seconds: float) -> None:
        """Take in how long a shard took."""
        self.times_s.append(seconds)
        ordered, middle = sorted(self.times_s), len(self.times_s) // 2
        if len(ordered) % 2:  # ``median``, without its calls: each run of shards is learned from
            self.usual_s = ordered[middle]
        else:
            self.usual_s = (ordered[middle - 1] + ordered[middle]) / 2


class Members:
    """The workers that have joined and not left, by their numbers, in order."""

    def __init__(self) -> None:
        self._by_number: dict[int, Member] = {}

    def __len__(self) -> int:
        return len(self._by_number)

    def __contains__(self, worker: object) -> bool:
        return worker in self._by_number

    def __getitem__(self, worker: int) -> Member:
        return self._by_number[worker]

    def get(self, worker: int) -> Member | None:
        """Return the worker, or None if it is not there."""
        return self._by_number.get(worker)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of the workers, in order."""
        return tuple(self._by_number)

    def join(self, worker: int, place: str = "") -> None:
        """Add a worker. Ranks change."""
        self._by_number[worker] = Member(place=place)
        self._by_number = dict(sorted(self._by_number.items()))
        self._rank()

    def leave(self, worker: int) -> Task | None:
        """Remove a worker, and return what it was computing. Ranks change."""
        task = self._by_number.pop(worker).task
        self._rank()
        return task

    def _rank(self) -> None:
        # Large places come first, where subtrees of a power of two begin: what a place has of one
        # can be added there. The coordinator's own comes last: nothing travels from there.
        sizes = Counter(member.place for member in self._by_number.values())

        def order(entry: tuple[int, Member]) -> tuple[bool, int, str, int]:
            place = entry[1].place
            return not place, -sizes[place], place, entry[0]

        for rank, (_, member) in enumerate(sorted(self._by_number.items(), key=order)):
            member.rank_of = (rank, len(self._by_number))

    def ranks(self) -> dict[int, tuple[int, int]]:
        """Return (rank, number of workers) of every worker."""
        return {worker: member.rank_of for worker, member in self._by_number.items()}

    def are_among(self, workers: list[int]) -> bool:
        """Return whether there is nobody but these, some of whom may have left."""
        return self._by_number.keys() <= set(workers)

    # --- what they compute ------------------------------------------------------------------------

    def idle(self) -> list[int]:
        """Return the workers that can be given a shard."""
        return [
            worker
            for worker, member in self._by_number.items()
            if member.task is None and not member.is_replaced
        ]

    def tasks(self, step: int) -> Iterator[tuple[int, Task]]:
        """Yield who computes a shard of a step, with the task."""
        for worker, member in self._by_number.items():
            if member.task is not None and member.task.step == step:
                yield worker, member.task

    def computing(self, step: int) -> dict[int, list[int]]:
        """Return the shards of a step that are being computed, with the workers on each."""
        workers_on: dict[int, list[int]] = {}
        for worker, task in self.tasks(step):
            for shard in task.shards:
                workers_on.setdefault(shard, []).append(worker)
        return workers_on

    # --- how long it takes them -------------------------------------------------------------------

    def usual_s_of_all(self) -> float:
        """Return the median of the workers' usual times; infinite before one is known."""
        known = [m.usual_s for m in self._by_number.values() if m.usual_s is not None]
        return median(known) if known else inf

    def expected_s(self, worker: int) -> float:
        """Return how long a shard takes there: as long as elsewhere, before one is done."""
        own_s = self._by_number[worker].usual_s
        return self.usual_s_of_all() if own_s is None else own_s

    def silent(self, timeout_s: float) -> Iterator[tuple[float, int]]:
        """Yield when each busy worker will have been silent for too long, if it does not answer.

        A slow one has 3 times its usual time. One that is being ended owes no answer.
        """
        for worker, member in self._by_number.items():
            if member.task is not None and not member.is_replaced:
                usual_s = (member.usual_s or 0.0) * member.task.count
                yield member.task.since + max(timeout_s, 3 * usual_s), worker
