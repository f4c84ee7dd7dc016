"""Towers: workers as threads of this process, one replica each.

A tower's thread has its own random stream and its own number of intra-op threads, and owns its
replica. The replicas stay between steps and between jobs.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

import torch

from quorate.coordinator import Compute, Discard, Done, Event, Failed, Joined, Keep, Replace, Tick
from quorate.job import Job
from quorate.replica import Replica
from quorate.shard_sum import ShardSum
from quorate.streams import Stream
from quorate.transports import Part
from quorate.tree import TreeSum


class Towers:
    """A thread per device entry.

    Args:
        devices: one per tower.
        make_replica: called here, once per tower.
        threads: intra-op threads of each tower. The bits of a matrix product depend on it.
    """

    def __init__(
        self,
        devices: Sequence[torch.device],
        make_replica: Callable[[torch.device], Replica],
        *,
        threads: int,
    ) -> None:
        self.towers = [
            _Tower(number, make_replica(device), threads) for number, device in enumerate(devices)
        ]
        self._started = False

    def can_compute(self, dataset: object) -> bool:  # noqa: ARG002
        return True

    def open(self, job: Job) -> TowersChannel:
        channel = TowersChannel(job, self.towers)
        if not self._started:  # only now: the feed may have forked, which is no good with threads
            self._started = True
            for tower in self.towers:
                tower.start()
        return channel

    def close(self) -> None:
        if not self._started:
            return
        for tower in self.towers:
            tower.mailbox.put(None)
        # After a second Ctrl-C nobody waits for user code that may be stuck.
        at_once = isinstance(sys.exc_info()[1], (KeyboardInterrupt, SystemExit))
        for tower in self.towers:
            tower.join(timeout=0.1 if at_once else None)


class TowersChannel:
    """One job's conversation with all towers."""

    def __init__(self, job: Job, towers: Sequence[_Tower]) -> None:
        self._job = job
        self._feed = job.feed()
        self._towers = towers
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._errors: dict[tuple[int, int, int], BaseException] = {}
        self._failure: Exception | None = None  # of adding, which no other worker could do better
        # What each tower holds of its step.
        self._held = [_Held(job) for _ in towers]
        for tower in towers:
            self._events.put(Joined(tower.number))

    def send(self, effect: Compute | Keep | Discard | Replace) -> None:
        if isinstance(effect, Replace):
            return  # a thread cannot be ended; another tower computes what it does not
        tower, held = self._towers[effect.worker], self._held[effect.worker]
        step, shard = effect.step, effect.shard
        match effect:
            case Compute():
                tower.mailbox.put(lambda stream: self._compute(tower, held, stream, step, shard))
            case Keep():
                held.decided.append((step, shard))
                tower.mailbox.put(lambda _: self._add(held))
            case Discard():
                tower.mailbox.put(lambda _: held.discard(tower.replica, step, shard))

    def receive(self, timeout_s: float | None) -> Event | None:
        try:
            event = self._events.get(timeout=timeout_s)
        except Empty:
            return None
        if self._failure is not None:
            raise self._failure
        return event

    def post(self, event: Event) -> None:
        self._events.put(event)

    def collect(self, step: int, holders: Sequence[int]) -> list[Part]:
        # A holder may be computing a copy that has lost: what is left to add is added here.
        for worker in holders:
            self._add(self._held[worker])
        if self._failure is not None:
            raise self._failure
        return [part for worker in holders for part in self._held[worker].parts(step)]

    def error(self, worker: int, step: int, shard: int) -> BaseException:
        return self._errors[worker, step, shard]

    def close(self) -> None:
        self._feed.close()

    def _compute(self, tower: _Tower, held: _Held, stream: Stream, step: int, shard: int) -> None:
        try:
            held.begin(tower.replica, step)
            result = self._job.compute(tower.replica, stream, self._feed, step, shard)
            held.pending[step, shard] = result
        except BaseException as error:  # the edge of the thread: the coordinator decides
            self._job.annotate(error, tower.number, tower.replica.device, step, shard)
            self._errors[tower.number, step, shard] = error
            self._events.put(Failed(tower.number, step, shard))
        else:
            self._events.put(Done(tower.number, step, shard))

    def _add(self, held: _Held) -> None:
        try:
            held.add_decided()
        except Exception as error:  # the edge of the thread: raised by receive() or collect()
            self._failure = error
            self._events.put(Tick())


class _Held:
    """What one tower holds for one job: results not decided on, and the sums of those kept.

    The tower adds what was decided when it comes to it; ``collect`` adds the rest.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._step = -1
        self._sum: TreeSum[ShardSum] | None = None
        self._adding = threading.Lock()
        self.pending: dict[tuple[int, int], ShardSum] = {}
        self.decided: deque[tuple[int, int]] = deque()  # (step, shard) to be kept

    def begin(self, replica: Replica, step: int) -> None:
        if step != self._step:
            for part in self._sum.parts.values() if self._sum is not None else ():
                replica.recycle(part)
            self._sum = TreeSum(self._job.plan.shards_of(step), replica.add)
            self._step = step

    def add_decided(self) -> None:
        with self._adding:
            while self.decided:
                step, shard = self.decided.popleft()
                assert self._sum is not None
                assert step == self._step
                self._sum.put((0, shard), self.pending.pop((step, shard)))

    def discard(self, replica: Replica, step: int, shard: int) -> None:
        replica.recycle(self.pending.pop((step, shard)))

    def parts(self, step: int) -> list[Part]:
        assert self._sum is not None
        assert step == self._step
        return list(self._sum.parts.items())


class _Tower(threading.Thread):
    """One worker's thread: carries out what is put into its mailbox, in order."""

    def __init__(self, number: int, replica: Replica, threads: int) -> None:
        super().__init__(name=f"quorate-tower-{number}", daemon=True)
        self.number = number
        self.replica = replica
        self.mailbox: SimpleQueue[Callable[[Stream], None] | None] = SimpleQueue()
        self._threads = threads

    def run(self) -> None:
        torch.set_num_threads(self._threads)  # OpenMP keeps this number per thread
        # Autocast's cache of cast weights is the process's, and any thread that leaves autocast
        # empties it: whether a weight is cast once or twice would depend on the other towers.
        torch.set_autocast_cache_enabled(False)
        device = self.replica.device
        if device.type != "cpu":
            torch.accelerator.set_device_index(device.index or 0)  # so is "cuda" without a number
        with Stream() as stream:
            while (work := self.mailbox.get()) is not None:
                work(stream)
