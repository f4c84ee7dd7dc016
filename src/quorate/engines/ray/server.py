"""A server: an actor with a slice of the parameters, which agents push gradients to."""

from __future__ import annotations

import threading

import numpy as np
import ray

from quorate.engines.ray.relayed import packed, same_packages, unpacked
from quorate.engines.servers import Image, handler_of
from quorate.machine import this_host

LIFE, WORK = "life", "work"  # threads of a server


class Server:
    """One server. Ray calls all but ``live`` in one thread, in the order in which they come.

    Args:
        number: of the server.
        handler: what does the work: see ``handler_of``.
    """

    def __init__(self, number: int, handler: str) -> None:
        self._number = number
        self._handler = handler_of(handler)
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
        answer, values = self._handler.do(unpacked(told), np.asarray(image))
        return packed(answer), values  # Ray copies them before the next call
