"""Drains: which nodes of the cluster are to go, as far as Ray says so before they are gone.

Whoever is to end a node may have Ray drain it first: a preemption notice, the autoscaler, a pod
that is deleted. It gets nothing new then, and what runs there runs on, until the node is ended, a
moment or minutes later. Ray tells nobody; it can be asked.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Protocol

import ray

LOOK_S = 1.0  # how often Ray is asked; it takes 3 ms
ANSWER_S = 5  # that Ray may take to answer

DRAINING = "DRAINING"


class Resident(Protocol):
    """Who is on a node."""

    node_id: str  # "" before it is on any

    def leave(self, why: str) -> None:
        """Be told that the node is to go, perhaps again and again. Another thread does."""


class Drains:
    """A thread that tells whoever is on a node that is drained. ``close`` it.

    Args:
        residents: returns those that are there at the moment.
    """

    def __init__(self, residents: Callable[[], Iterable[Resident]]) -> None:
        self._residents = residents
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._look, name="quorate-drains", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ask no more."""
        self._is_closed.set()
        self._thread.join(2.0 * ANSWER_S)

    def _look(self) -> None:
        address = ray.get_runtime_context().gcs_address
        while not self._is_closed.wait(LOOK_S):
            draining = drained(address)
            for resident in self._residents():
                if resident.node_id in draining:
                    resident.leave("which Ray drains")


def drained(address: str) -> set[str]:
    """Return the ids of the nodes that are drained; none if Ray cannot say.

    Args:
        address: of the cluster.
    """
    # ``ray.nodes()`` does not have it. This is what ``ray status`` asks; where another version of
    # Ray has something else, nodes are noticed when they are gone.
    with suppress(Exception):
        from ray.autoscaler.v2.sdk import get_cluster_status

        status = get_cluster_status(address, timeout=ANSWER_S)
        nodes = [*status.active_nodes, *status.idle_nodes]
        return {node.node_id for node in nodes if node.node_status == DRAINING}
    return set()
