"""The life of a cluster: the Ray processes that a driver depends on, and drained nodes.

The processes are the raylet of this machine and, if the cluster was started for the run, the
cluster's head (``gcs_server``). Ray does not report their end to a driver. Calls that touch the
object store after the end of the raylet (``ray.put``, ``ray.get``, the release of an array in the
store) end the driver's process from C++, with exit code 1: no exception, nothing saved. So quorate
holds a connection to each process, cut by the kernel at the end of the process, and looks at the
connection before each such call. Without the cluster's head Ray ends a driver after a minute, at
any point. Before then the run has to end by itself, and save.

Before the end of a node Ray may drain the node: after a preemption notice, by the autoscaler, for
a deleted pod. A drained node gets no new work; its processes run on until the node is ended, a
moment or minutes later.
"""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from quorate.engines.processes.endings import Ending
from quorate.errors import UserError, cut
from quorate.machine.descriptors import any_readable
from quorate.machine.limits import (
    CLUSTER_ANSWER_S,
    CLUSTER_SILENCE_S,
    LOCAL_CONNECT_S,
    WORKER_POLL_S,
)

if TYPE_CHECKING:
    from quorate.engines.ray.pool import RayWorkerHandle


LOST_CLUSTER = Ending(1, lost="the Ray cluster")
MOST_SAID = 600  # characters of Ray's text about an actor that cannot be started
NODE_DIED = "its node has died"  # in Ray's text about an actor

Ref = Any  # ray.ObjectRef
Address = str | tuple[str, int]  # the path of a Unix socket; host and port


class OwnNode:
    """The node of this driver. Needs ``close``. All further methods are thread-safe.

    Args:
        is_local: whether the cluster was started for this run, and so ends with its head.
    """

    def __init__(self, *, is_local: bool) -> None:
        context = ray.get_runtime_context()
        own = next(node for node in ray.nodes() if node["NodeID"] == context.get_node_id())
        self.raylet: str = own["RayletSocketName"]
        self._again = "" if is_local else ", once Ray runs here again"
        self._processes = {"raylet": ProcessConnection(self.raylet)}
        if is_local:
            host, _, port = context.gcs_address.rpartition(":")
            self._processes["head process, gcs_server,"] = ProcessConnection(
                (host.strip("[]"), int(port))
            )

    @property
    def gone(self) -> str | None:
        """The reason why Ray cannot be called any more; None: Ray can be called. Does not block."""
        for name, process in self._processes.items():
            if process.has_ended():
                return (
                    f"Ray's {name} on this machine has ended: it was killed, or a process that it "
                    f"depends on was; the same command resumes{self._again}"
                )
        return None

    def require(self) -> None:
        """Raise UserError if Ray cannot be called any more. Does not block."""
        if (why := self.gone) is not None:
            raise UserError(why)

    def put(self, value: object) -> Ref:
        """Put a value into the object store, and return a reference.

        Raises:
            UserError: Ray cannot be called any more.
        """
        self.require()
        return ray.put(value)

    def get(self, ref: Ref) -> Any:
        """Return the value of a reference. Blocks until the value is there.

        Raises:
            UserError: Ray cannot be called any more.
            RayError: the value is lost.
        """
        self.require()
        return ray.get(ref)

    def wait(self, refs: list[Ref]) -> None:
        """Wait until all values are there, or lost. Blocks.

        Raises:
            UserError: Ray cannot be called any more.
        """
        missing = refs
        while missing:
            self.require()
            missing = ray.wait(refs, num_returns=len(refs), timeout=WORKER_POLL_S)[1]

    def kill(self, actor: Any) -> None:
        """End an actor, unless Ray cannot be called any more. Does not block."""
        if self.gone is None:
            with suppress(RayError, ValueError):
                ray.kill(actor, no_restart=True)

    def ending_of(self, error: BaseException, actor: str) -> Ending:
        """Return the ending of workers whose actor was ended by Ray or the system.

        Args:
            error: Ray's.
            actor: for people: "its actor".
        """
        if self.gone is not None:  # the actor ended with the raylet
            return LOST_CLUSTER
        if isinstance(error, OutOfMemoryError):
            return Ending(-signal.SIGKILL, is_out_of_memory=True)
        if not isinstance(error, RayError):
            return Ending(1, f"{type(error).__name__}: {error}")
        text, is_dead = " ".join(str(error).split()), isinstance(error, ActorDiedError)
        if isinstance(error, RayTaskError) or (is_dead and error.actor_init_failed):
            return Ending(1, cut(text[:MOST_SAID]))
        is_preempted = is_dead and error.preempted
        if NODE_DIED in text:
            actor = "its node, which was preempted" if is_preempted else "its node"
        return Ending(-signal.SIGKILL, lost=actor)

    def close(self) -> None:
        """Close the connections."""
        for process in self._processes.values():
            process.close()


def actor_on(node_id: str, kind: type, *threads: str) -> Any:
    """Return the actor class for a node; its actors take no resources, and are never restarted.

    Args:
        kind: the class.
        threads: names of the actor's threads: methods are called with ``concurrency_group=``.
    """
    return ray.remote(
        num_cpus=0,
        max_restarts=0,
        concurrency_groups=dict.fromkeys(threads, 1),
        # Ray 2.60 ignores a soft affinity of actors without resources.
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
    )(kind)


class ProcessConnection:
    """A connection to a process, cut by the kernel at the end of the process.

    Args:
        address: of the process.
    """

    def __init__(self, address: Address) -> None:
        self._address = address
        self._lock = threading.Lock()
        self._was_there = self._has_ended = False
        self._socket: socket.socket | None = None
        self._connect()

    def has_ended(self) -> bool:
        """Return whether nobody listens at the address any more. Does not block for long."""
        with self._lock:
            end = self._socket
            is_cut = end is None or any_readable(end.fileno(), timeout_s=0.0)
            if self._was_there and not self._has_ended and is_cut:
                # A process may close a silent connection. So connect anew.
                self._disconnect()
                self._connect()
            return self._has_ended

    def close(self) -> None:
        """Close the connection; ``has_ended`` stays as known."""
        with self._lock:
            self._was_there = False
            self._disconnect()

    def _connect(self) -> None:
        try:
            self._socket = _connected(self._address)
        except ConnectionRefusedError:
            self._has_ended = True
        except FileNotFoundError:  # the folder was removed, or is in another container
            self._has_ended = self._was_there
        except OSError:  # the process is busy, or descriptors are lacking: look again later
            return
        else:
            self._was_there = True

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _connected(address: Address) -> socket.socket:
    """Return a connection.

    Raises:
        OSError: nobody listens at the address.
    """
    if not isinstance(address, str):
        return socket.create_connection(address, LOCAL_CONNECT_S)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(LOCAL_CONNECT_S)
        connection.connect(address)
    except BaseException:
        connection.close()
        raise
    return connection


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
