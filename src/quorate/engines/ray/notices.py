"""Notices: what Ray tells nobody and can be asked: which nodes are to go, and whether it is there.

Whoever is to end a node may have Ray drain it first: a preemption notice, the autoscaler, a pod
that is deleted. It gets nothing new then, and what runs there runs on, until the node is ended, a
moment or minutes later.

Where Ray's head is gone, Ray ends a driver after a minute, whatever it is at; where the raylet of
the driver's machine is gone, Ray does nothing, or ends the driver at once (see ``own_node``).
Before that the run has to end by itself, and save.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol

import ray

from quorate.engines.ray.own_node import OwnNode
from quorate.machine.limits import CLUSTER_ANSWER_S, CLUSTER_SILENCE_S, WORKER_POLL_S

DRAINING = "DRAINING"


class Resident(Protocol):
    """Who is on a node. The methods are called in another thread, perhaps again and again."""

    node_id: str  # "" before it is on any

    def leave(self, why: str) -> None:
        """Be told that the node is to go."""

    def lose(self) -> None:
        """Be told that nobody can be reached any more."""


class Notices:
    """A thread that asks Ray, and tells whom it concerns. ``close`` it.

    Args:
        residents: returns those that are there at the moment.
        node: the coordinator's own.
    """

    def __init__(self, residents: Callable[[], Iterable[Resident]], node: OwnNode) -> None:
        self._head_gone: str | None = None
        self._residents = residents
        self._node = node
        self._address: str = ray.get_runtime_context().gcs_address
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._look, name="quorate-notices", daemon=True)
        self._thread.start()

    @property
    def gone(self) -> str | None:
        """Why nobody can be started any more; None: somebody can. Any thread may ask."""
        return self._node.gone or self._head_gone

    def close(self) -> None:
        """Ask no more."""
        self._is_closed.set()
        self._thread.join(2.0 * CLUSTER_ANSWER_S)

    def _look(self) -> None:
        heard_at = time.monotonic()
        while not self._is_closed.wait(WORKER_POLL_S):
            if self._node.gone is not None:
                self._lose_all()
                continue
            answer = drained(self._address)
            if isinstance(answer, set):
                heard_at = time.monotonic()
                for resident in self._residents():
                    if resident.node_id in answer:
                        resident.leave("because Ray drains the node")
            elif answer is not None and time.monotonic() - heard_at > CLUSTER_SILENCE_S:
                self._head_gone = (
                    f"the Ray cluster at {self._address} has not answered for "
                    f"{CLUSTER_SILENCE_S:g} s ({answer}): is its head node gone? Start it, and the "
                    "same command resumes"
                )
                self._lose_all()

    def _lose_all(self) -> None:
        for resident in self._residents():
            resident.lose()


def drained(address: str) -> set[str] | str | None:
    """Return the ids of the nodes that are drained; why Ray does not answer; None: it cannot say.

    Args:
        address: of the cluster.
    """
    # ``ray.nodes()`` has no drained ones. This is what ``ray status`` asks. It is no documented
    # call: where another version of Ray has something else, nodes are noticed when they are gone.
    try:
        from ray.autoscaler.v2.sdk import get_cluster_status
    except ImportError:
        return None
    try:
        status = get_cluster_status(address, timeout=CLUSTER_ANSWER_S)
        nodes = [*status.active_nodes, *status.idle_nodes]
        return {node.node_id for node in nodes if node.node_status == DRAINING}
    except (AttributeError, TypeError):
        return None
    except Exception as error:  # the edge of the thread: Ray has many, not all of them public
        return f"{type(error).__name__}: {error}"[:200]
