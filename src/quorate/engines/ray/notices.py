"""Notices of a Ray cluster: drained nodes, and the end of the cluster itself. Ray reports neither.

Before the end of a node Ray may drain the node: after a preemption notice, by the autoscaler, for
a deleted pod. A drained node gets no new work; its processes run on until the node is ended, a
moment or minutes later.

Without its head Ray ends a driver after a minute, at any point; without the raylet of
the driver's machine Ray does nothing, or ends the driver at once (see ``own_node``). Before then
the run has to end by itself, and save.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

import ray

from quorate.engines.ray.own_node import LOST_CLUSTER, OwnNode
from quorate.machine.limits import CLUSTER_ANSWER_S, CLUSTER_SILENCE_S, WORKER_POLL_S

if TYPE_CHECKING:
    from quorate.engines.ray.worker_handle import RayWorkerHandle

DRAINING = "DRAINING"


class ClusterNotices:
    """A thread to ask Ray, and to inform the workers concerned. Needs ``close``.

    Args:
        workers: returns the present workers.
        node: the coordinator's own.
    """

    def __init__(self, workers: Callable[[], Iterable[RayWorkerHandle]], node: OwnNode) -> None:
        self._head_gone: str | None = None
        self._workers = workers
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
            for worker in self._workers():
                worker.lose_relay_if_silent()
            answer = drained(self._address)
            if isinstance(answer, set):
                heard_at = time.monotonic()
                for worker in self._workers():
                    if worker.node_id in answer:
                        worker.call(partial(worker.leave, "because Ray drains the node"))
            elif answer is not None and time.monotonic() - heard_at > CLUSTER_SILENCE_S:
                self._head_gone = (
                    f"the Ray cluster at {self._address} has not answered for "
                    f"{CLUSTER_SILENCE_S:g} s ({answer}): is its head node gone? Start it, and the "
                    "same command resumes"
                )
                self._lose_all()

    def _lose_all(self) -> None:
        for worker in self._workers():
            worker.call(partial(worker.lose_all, LOST_CLUSTER))


def drained(address: str) -> set[str] | str | None:
    """Return the ids of drained nodes; or why Ray does not answer; None: Ray cannot say.

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
