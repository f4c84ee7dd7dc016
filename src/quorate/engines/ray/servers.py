"""Servers of a Ray cluster, as the coordinator has them: an actor each, on different nodes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from quorate.engines.job import class_of
from quorate.engines.messages import pack, unpack
from quorate.engines.ray.images import Ref, difference, same_packages
from quorate.engines.ray.own_node import OwnNode
from quorate.engines.servers import NO_IMAGE, Answer, Handler, Image, Told
from quorate.errors import ServerError, UserError, cut
from quorate.machine import this_host


class RayServers:
    """All servers of a run. ``close`` it.

    Args:
        count: S.
        handler: the ``class_name`` of the servers' ``Handler``.
        node: the coordinator's own.

    Raises:
        ServerError: one cannot be started.
        UserError: one has other packages than this process.
    """

    def __init__(self, count: int, handler: str, node: OwnNode) -> None:
        self._node = node
        self.count = count
        self.have_newest = False
        self._ring: Callable[[], None] = lambda: None
        self._lost: int | None = None
        self.where: Sequence[str] = ["a node"] * count
        self._refs: list[Ref] = []  # what workers compute from, by server
        nodes = _nodes()
        self.actors = [
            ray.remote(
                num_cpus=0,  # it works while workers wait
                max_restarts=0,  # its slice would be lost
                concurrency_groups={LIFE: 1, WORK: 1},
                # A soft affinity Ray 2.60 does not keep for what takes no resources.
                scheduling_strategy=NodeAffinitySchedulingStrategy(
                    nodes[number % len(nodes)], soft=False
                ),
            )(ServerActor).remote(number, handler)
            for number in range(count)
        ]
        self._meet()
        # Held: a future that nobody holds is never called.
        self._lives = [actor.live.options(concurrency_group=LIFE).remote() for actor in self.actors]
        for number, life in enumerate(self._lives):
            life.future().add_done_callback(lambda _, number=number: self._note_lost(number))

    def watch(self, ring: Callable[[], None]) -> None:
        """Have somebody woken when one is lost; any thread may call it then."""
        self._ring = ring

    def require(self) -> None:
        """Raise ServerError if one is lost, UserError if Ray cannot be called any more."""
        self._node.require()
        if self._lost is not None:
            raise self._error(self._lost)

    @property
    def refs(self) -> list[Ref]:
        """What workers compute from, as it is now: an object per server, on its node."""
        return self._refs

    def keep(self, ticket: int, step: int, shard: int, leaves: int) -> None:
        """Have all add a shard, which they have, to the sum of its step. Does not block."""
        for actor in self.actors:
            actor.keep.options(concurrency_group=WORK).remote(ticket, step, shard, leaves)

    def ask(self, told: Sequence[Told], images: Sequence[Image] = ()) -> list[Answer]:
        """Ask each for something of its own, and return the answers. Blocks."""
        return [(unpack(text), image) for text, image in self._got(self._asked(told, images))]

    def renew(self, told: Sequence[Told], images: Sequence[Image] = ()) -> list[Told]:
        """Likewise, for images that workers compute from as long as they are the newest. Blocks."""
        refs = self._asked(told, images, returns=2)
        answers = [unpack(text) for text in self._got([text for text, _ in refs])]
        self._refs = [image for _, image in refs]  # the older ones go with their last reader
        self.have_newest = True
        return answers

    def values(self) -> list[Image]:
        """Return the images that workers compute from. Blocks."""
        return self._got(self._refs)

    def close(self) -> None:
        """End all of them."""
        self._ring = lambda: None
        self._refs = []
        for actor in self.actors:
            with suppress(RayError, ValueError):
                ray.kill(actor, no_restart=True)

    def _meet(self) -> None:
        """Wait until all are there, and refuse one that would compute something else."""
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
        """Return what servers have answered, by their number."""
        self._node.wait(list(refs))  # they come side by side
        found = []
        for number, ref in enumerate(refs):
            try:
                found.append(self._node.get(ref))
            except RayTaskError:  # it is there, and raised something
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
    """Return the nodes that are there, in an order that all agree on; the coordinator's is last.

    Its link has the workers' records, and all of a checkpoint.
    """
    own = ray.get_runtime_context().get_node_id()
    there = (node["NodeID"] for node in ray.nodes() if node["Alive"])
    return sorted(there, key=lambda node: (node == own, node))


LIFE, WORK = "life", "work"  # threads of a server


class ServerActor:
    """One server. Ray calls all but ``live`` in one thread, in the order in which they come.

    Args:
        number: of the server.
        handler: the ``class_name`` of the server's ``Handler``.
    """

    def __init__(self, number: int, handler: str) -> None:
        self._number = number
        self._handler = class_of(handler, Handler)()
        self._end = threading.Event()

    def __repr__(self) -> str:
        """Return what Ray writes before each line that is printed here."""
        return f"quorate server {self._number}"

    def hello(self) -> tuple[str, dict[str, str]]:
        """Return where it is, for people, and what has to be the same as elsewhere."""
        node = ray.get_runtime_context().get_node_id()
        return f"{this_host.name()} (node {node[:8]})", same_packages()

    def live(self) -> None:
        """Return with the end of the actor alone: whoever waits for this hears of that."""
        self._end.wait()

    def take(self, ticket: int, step: int, image: Image) -> None:
        """Take a shard's gradient: when this has returned it is here."""
        self._handler.take(ticket, step, image)

    def keep(self, ticket: int, step: int, shard: int, leaves: int) -> None:
        """Add a shard to the sum of its step."""
        self._handler.keep(ticket, step, shard, leaves)

    def do(self, told: bytes, image: Image) -> tuple[bytes, Image]:
        """Do what the coordinator asks for."""
        answer, values = self._handler.do(unpack(told), np.asarray(image))
        return pack(answer), values  # Ray copies them before the next call
