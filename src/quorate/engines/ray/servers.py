"""Servers of a Ray cluster: an actor for each slice of the parameters, on different nodes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError, RayTaskError

from quorate.engines.job import class_of
from quorate.engines.messages import pack, unpack
from quorate.engines.partition import Partition
from quorate.engines.ray.cluster_life import OwnNode, Ref, actor_on
from quorate.engines.ray.node_facts import difference, same_packages
from quorate.engines.ray.node_sums import WorkerResult
from quorate.engines.servers import NO_IMAGE, Answer, Image, SliceHandler, Told, as_image
from quorate.errors import ServerError, UserError, cut
from quorate.machine import this_host
from quorate.replica.flat import Flat


class RayServers:
    """The coordinator's end of all servers of a run. Needs ``close``.

    Args:
        count: S.
        handler: the ``class_name`` of the servers' ``SliceHandler``.
        node: the coordinator's own.
        ring: called when a server is lost, by any thread.

    Raises:
        ServerError: a server cannot be started.
        UserError: a server's packages differ from this process's.
    """

    def __init__(self, count: int, handler: str, node: OwnNode, ring: Callable[[], None]) -> None:
        self._node = node
        self.count = count
        self.have_newest = False
        self._ring = ring
        self._lost: int | None = None
        self.where: Sequence[str] = ["a node"] * count
        # The images that workers compute from: an object per server, on its node.
        self.refs: list[Ref] = []
        nodes = _nodes()
        self.actors = [
            # Without resources, as a server works while workers wait.
            actor_on(nodes[number % len(nodes)], ServerActor, LIFE, WORK).remote(number, handler)
            for number in range(count)
        ]
        self._meet()
        # Held: a future that nobody holds is never called.
        self._lives = [actor.live.options(concurrency_group=LIFE).remote() for actor in self.actors]
        for number, life in enumerate(self._lives):
            life.future().add_done_callback(lambda _, number=number: self._note_lost(number))

    def require(self) -> None:
        """Raise ServerError if a server is lost, UserError if Ray cannot be called any more."""
        self._node.require()
        if self._lost is not None:
            raise self._error(self._lost)

    def keep(self, ticket: int, step: int, shard: int, leaves: int) -> None:
        """Have all servers add a shard's gradient to the sum of its step. Does not block."""
        for actor in self.actors:
            actor.keep.options(concurrency_group=WORK).remote(ticket, step, shard, leaves)

    def drop(self, ticket: int) -> None:
        """Have all servers forget a shard's gradient. Does not block."""
        for actor in self.actors:
            actor.drop.options(concurrency_group=WORK).remote(ticket)

    def ask(self, told: Sequence[Told], images: Sequence[Image] = ()) -> list[Answer]:
        """Send each server a request of its own, and return the answers. Blocks."""
        return [(unpack(text), image) for text, image in self._got(self._asked(told, images))]

    def renew(self, told: Sequence[Told], images: Sequence[Image] = ()) -> list[Told]:
        """Send requests for new images that workers compute from. Blocks until the answers."""
        refs = self._asked(told, images, returns=2)
        answers = [unpack(text) for text in self._got([text for text, _ in refs])]
        self.refs = [image for _, image in refs]  # older images go with their last reader
        self.have_newest = True
        return answers

    def values(self) -> list[Image]:
        """Return the images that workers compute from. Blocks."""
        return self._got(self.refs)

    def close(self) -> None:
        """End all of them."""
        self.refs = []
        for actor in self.actors:
            self._node.kill(actor)

    def _meet(self) -> None:
        """Wait until all servers are there, and refuse a server with different packages."""
        hellos = [actor.hello.options(concurrency_group=WORK).remote() for actor in self.actors]
        self._node.wait(hellos)
        here, where = same_packages(), []
        for number, hello in enumerate(hellos):
            try:
                place, there = self._node.get(hello)
            except RayError as error:
                why = cut(" ".join(str(error).split()))
                raise ServerError(f"server {number} cannot be started", why) from error
            if (differs := difference(here, there)) is not None:
                raise UserError(f"server {number} is on {place}, where differs {differs}")
            where.append(place)
        self.where = where

    def _asked(self, told: Sequence[Told], images: Sequence[Image], returns: int = 1) -> list[Any]:
        self._node.require()
        values = images or [NO_IMAGE] * self.count
        return [
            actor.do.options(concurrency_group=WORK, num_returns=returns).remote(pack(own), image)
            for actor, own, image in zip(self.actors, told, values, strict=True)
        ]

    def _got(self, refs: Sequence[Ref]) -> list[Any]:
        """Return the answers of servers, by number. Blocks."""
        self._node.wait(list(refs))  # answers come side by side
        found = []
        for number, ref in enumerate(refs):
            try:
                found.append(self._node.get(ref))
            except RayTaskError:  # the server lives, and its handler raised an error
                raise
            except RayError as error:
                self._node.require()  # else the server ended with the raylet of this machine
                raise self._error(number) from error
        return found

    def _note_lost(self, number: int) -> None:
        self._lost = number
        self._ring()

    def _error(self, number: int) -> ServerError:
        return ServerError(
            f"server {number} of {self.count} on {self.where[number]} is lost, and its slice of "
            "the parameters with it",
            fix="run the same command again: the run resumes from the newest checkpoint, with as "
            "many servers as you like",
        )


def _nodes() -> list[str]:
    """Return the living nodes in a fixed order; the coordinator's is last.

    The link of the coordinator's node carries the workers' records, and all of a checkpoint.
    """
    own = ray.get_runtime_context().get_node_id()
    there = (node["NodeID"] for node in ray.nodes() if node["Alive"])
    return sorted(there, key=lambda node: (node == own, node))


LIFE, WORK = "life", "work"  # threads of a server


class ServerActor:
    """A server. Ray calls all methods but ``live`` in one thread, in the order of the calls.

    Args:
        number: of the server.
        handler: the ``class_name`` of the server's ``SliceHandler``.
    """

    def __init__(self, number: int, handler: str) -> None:
        self._number = number
        self._handler = class_of(handler, SliceHandler)()
        self._end = threading.Event()

    def __repr__(self) -> str:
        """Return the text that Ray writes before each printed line."""
        return f"quorate server {self._number}"

    def hello(self) -> tuple[str, dict[str, str]]:
        """Return the place of the server, for people, and the versions of its packages."""
        node = ray.get_runtime_context().get_node_id()
        return f"{this_host.name()} (node {node[:8]})", same_packages()

    def live(self) -> None:
        """Block until the end of the actor: a waiting caller hears of the end."""
        self._end.wait()

    def take(self, ticket: int, image: Image) -> None:
        """Take a shard's gradient. After the return the server has the gradient."""
        self._handler.take(ticket, image)

    def keep(self, ticket: int, step: int, shard: int, leaves: int) -> None:
        """Add a shard to the sum of its step."""
        self._handler.keep(ticket, step, shard, leaves)

    def drop(self, ticket: int) -> None:
        """Forget a shard's gradient."""
        self._handler.drop(ticket)

    def do(self, told: bytes, image: Image) -> tuple[bytes, Image]:
        """Carry out a request of the coordinator."""
        answer, values = self._handler.do(unpack(told), np.asarray(image))
        return pack(answer), values  # Ray copies them before the next call


# --- a node of workers ---------------------------------------------------------------------------


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
            image = as_image(slicing.views(gradient, number))
            arrivals.append(take.remote(result.answer.ticket, image).future())
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
