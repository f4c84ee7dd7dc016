"""The coordinator's own node: the Ray processes that a driver depends on, and whether they live.

The processes are the raylet of this machine and, if the cluster was started for the run, the
cluster's head (``gcs_server``). Ray does not report their end to a driver. Calls that touch the
object store after the end of the raylet (``ray.put``, ``ray.get``, the release of an array in the
store) end the driver's process from C++, with exit code 1: no exception, nothing saved. So quorate
holds a connection to each process, cut by the kernel at the end of the process, and looks at the
connection before each such call.
"""

from __future__ import annotations

import signal
import socket
import threading
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayError, RayTaskError

from quorate.engines.processes.endings import Ending
from quorate.engines.ray.images import Ref
from quorate.errors import UserError, cut
from quorate.machine.descriptors import any_readable
from quorate.machine.limits import LOCAL_CONNECT_S, WORKER_POLL_S

LOST_CLUSTER = Ending(1, lost="the Ray cluster")
MOST_SAID = 600  # characters of Ray's text about an actor that cannot be started
NODE_DIED = "its node has died"  # in Ray's text about an actor

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
