"""Gradients on their way from a relay to the servers, a slice to each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from quorate.engines.partition import Partition
from quorate.engines.ray.node_sums import WorkerResult
from quorate.engines.ray.servers import WORK
from quorate.engines.servers import Image, as_image
from quorate.replica.flat import Flat


class GradientPusher:
    """Sends gradients to the servers, and holds the answers back until the gradients are there.

    The coordinator hears that a shard is done when all servers have its gradient: not before, so
    that nothing of a shard is lost with the node that computed it.

    Args:
        servers: actors.
        ring: called at each arrival, by any thread.
    """

    def __init__(self, servers: Sequence[Any], ring: Callable[[], None]) -> None:
        self._servers = servers
        self._ring = ring
        self._on_their_way: list[tuple[WorkerResult, Image, list[Future[Any]]]] = []

    def push(self, result: WorkerResult, gradient: Flat, slicing: Partition, rest: Image) -> None:
        """Send a gradient, which may be overwritten after the call. Does not block.

        Args:
            result: the worker's, held back until the arrival.
            rest: the result of the shard without the gradient, for the coordinator.
        """
        arrivals = []
        for number, server in enumerate(self._servers):
            take = server.take.options(concurrency_group=WORK)
            told = (
                result.answer.ticket,
                result.order.step,
                as_image(slicing.views(gradient, number)),
            )
            arrivals.append(take.remote(*told).future())
        result.answer.is_held = True
        self._on_their_way.append((result, rest.copy(), arrivals))
        for arrival in arrivals:
            arrival.add_done_callback(lambda _: self._ring())

    def arrived(self) -> Iterator[tuple[WorkerResult, Image]]:
        """Yield the results with arrived gradients, in order, with the rest of each result.

        A result whose gradient cannot be brought to a server is never given: the coordinator hears
        of the end of a server directly, and ends the run.
        """
        while self._on_their_way and all(a.done() for a in self._on_their_way[0][2]):
            result, rest, arrivals = self._on_their_way.pop(0)
            if all(arrival.exception() is None for arrival in arrivals):
                yield result, rest
