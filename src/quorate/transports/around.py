"""A transport around another one, which passes everything on: for whoever looks at a loop."""

from __future__ import annotations

from collections.abc import Sequence

from quorate.coordination.protocol import Cancel, Compute, Discard, Event, Keep, Replace
from quorate.replica.shard_sum import Part
from quorate.transports import Channel, Transport
from quorate.transports.job import Job
from quorate.transports.worker_status import WorkerStatus


class TransportAround:
    """A ``Transport``."""

    def __init__(self, inner: Transport) -> None:
        self.can_replace = inner.can_replace
        self._inner = inner

    def can_compute(self, dataset: object) -> bool:
        return self._inner.can_compute(dataset)

    def open(self, job: Job) -> Channel:
        return self._inner.open(job)

    def status(self) -> list[WorkerStatus]:
        return self._inner.status()

    def close(self) -> None:
        self._inner.close()


class ChannelAround:
    """A ``Channel``."""

    def __init__(self, inner: Channel) -> None:
        self._inner = inner

    def send(self, effect: Compute | Keep | Discard | Cancel | Replace) -> None:
        self._inner.send(effect)

    def receive(self, timeout_s: float | None) -> Event | None:
        return self._inner.receive(timeout_s)

    def now(self) -> float:
        return self._inner.now()

    def post(self, event: Event) -> None:
        self._inner.post(event)

    def collect(self, step: int, holders: Sequence[int]) -> list[Part]:
        return self._inner.collect(step, holders)

    def publish(self) -> None:
        self._inner.publish()

    def error(self, worker: int, step: int, shard: int) -> BaseException:
        return self._inner.error(worker, step, shard)

    def close(self) -> None:
        self._inner.close()
