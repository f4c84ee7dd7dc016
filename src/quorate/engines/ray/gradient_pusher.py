"""Pushed: gradients on their way from an agent to the servers, a slice to each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from quorate.engines.messages import Message
from quorate.engines.processes.arena import Image
from quorate.engines.ray.servers import WORK
from quorate.engines.servers import Slicing
from quorate.replica.flat import Flat


class _OnItsWay(NamedTuple):
    answer: Message
    rest: Image  # what goes to the coordinator
    arrivals: list[Future[Any]]


class GradientPusher:
    """The coordinator hears that a shard is done when all servers have its gradient: not before, so
    that nothing of a shard is lost with the node that computed it.

    Args:
        servers: actors.
        ring: called when one has something; any thread may call it.
    """

    def __init__(self, servers: Sequence[Any], ring: Callable[[], None]) -> None:
        self._servers = servers
        self._ring = ring
        self._on_their_way: list[_OnItsWay] = []

    def push(
        self, answer: Message, step: int, gradient: Flat, slicing: Slicing, rest: Image
    ) -> None:
        """Send a gradient, which may be written again when this has returned. Does not block.

        Args:
            answer: of the worker, for when it is there.
            rest: of what the shard yields.
        """
        arrivals = []
        for number, server in enumerate(self._servers):
            take = server.take.options(concurrency_group=WORK)
            ref = take.remote(answer["ticket"], step, slicing.cut(gradient, number))
            arrivals.append(ref.future())
        self._on_their_way.append(_OnItsWay({**answer, "is_held": True}, rest.copy(), arrivals))
        for arrival in arrivals:
            arrival.add_done_callback(lambda _: self._ring())

    def arrived(self) -> Iterator[tuple[Message, Image]]:
        """Yield the answers of what all servers have, in their order, and what goes with them.

        One that could not be brought to a server is never answered: the coordinator hears of a
        server's end by itself, and so does its run.
        """
        while self._on_their_way and all(a.done() for a in self._on_their_way[0].arrivals):
            answer, rest, arrivals = self._on_their_way.pop(0)
            if all(arrival.exception() is None for arrival in arrivals):
                yield answer, rest
