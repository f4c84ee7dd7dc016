"""The pool of workers of a Ray cluster: an actor each, wherever Ray has room for the worker."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import ray

from quorate.engines.processes.arena import Arena
from quorate.engines.processes.pool import Callback, LocalPool
from quorate.engines.processes.script import Script
from quorate.engines.ray.cluster import joined_cluster
from quorate.engines.ray.demand import RayDemand
from quorate.engines.ray.images import same_everywhere
from quorate.engines.ray.node_relay import NodeRelay, ParameterStore
from quorate.engines.ray.notices import ClusterNotices
from quorate.engines.ray.servers import RayServers
from quorate.engines.ray.worker_handle import RayWorkerHandle
from quorate.engines.ray.worker_lease import LIFE, PLACE, WorkerLease
from quorate.errors import SettingError, UserError
from quorate.machine import this_host
from quorate.machine.regular_file import is_folder
from quorate.replica.sparse.found import no_rows


class RayPool:
    """The workers of a Ray cluster, an actor each. Needs ``close``.

    Args:
        script: the script to run.
        arena: the coordinator's.
        demand: the resources of the run.
        address: of the cluster; see ``joined_cluster``.
        working_dir: a folder with the script, sent to every node. None: every node has the script
            at the same path.
        threads: intra-op threads of each worker.
        wake: has the coordinator's thread call ``flush``. Any thread may call it.
        servers: the number of servers with the parameters, and their handler: see ``RayServers``.

    Raises:
        UserError: there is no such cluster, or the cluster lacks resources.
        SettingError: the script is not in ``working_dir``, or gradients are by rows.
        ServerError: a server cannot be started.
    """

    takes_runs = False  # results travel one by one

    def __init__(
        self,
        script: Script,
        arena: Arena,
        demand: RayDemand,
        address: str | None,
        working_dir: str | None,
        threads: int,
        wake: Callable[[], None],
        servers: tuple[int, str] | None = None,
    ) -> None:
        if by_rows := arena.parameters.layout.by_rows:  # a result is the image of a slot, no more
            raise no_rows("engine", "ray", min(by_rows))
        folder = None if working_dir is None else folder_of(script, working_dir)
        # As many versions of parameters as workers may read, and a result of each worker.
        store_bytes = (2 * demand.of_one_machine + 4) * arena.slot_bytes
        self.script = script
        self.folder = folder
        self.same = same_everywhere(script)
        self.arena = arena
        self.threads = threads
        self.wake = wake
        self.actions: deque[tuple[RayWorkerHandle, Callback]] = deque()  # for the next ``flush``
        self._lives = itertools.count()
        self._handles: dict[int, RayWorkerHandle] = {}  # the newest of each worker
        self._relays: dict[str, NodeRelay] = {}  # by node; the newest
        self.servers: RayServers | None = None
        with ExitStack() as opened:
            self.local = opened.enter_context(closing(LocalPool(script, 1, threads)))
            self.node = opened.enter_context(joined_cluster(address, demand, store_bytes, folder))
            self._own_id = ray.get_runtime_context().get_node_id()
            if servers is not None:
                self.servers = RayServers(*servers, self.node, wake)
                opened.callback(self.servers.close)
            self.store = ParameterStore(arena, self.node, self.servers)
            opened.callback(self._close_relays)
            opened.callback(self._handles.clear)
            self._notices = ClusterNotices(lambda: list(self._handles.values()), self.node)
            opened.callback(self._notices.close)
            self._opened = opened.pop_all()
        self.lease = ray.remote(
            max_restarts=0,  # the supervisor decides whether a new actor takes its place
            scheduling_strategy="SPREAD",
            concurrency_groups={PLACE: 1, LIFE: 1},
            **demand.options(),
        )(WorkerLease)

    def start(self, number: int) -> RayWorkerHandle:
        """Request a worker, for when the cluster has room. Does not block.

        Raises:
            UserError: the cluster is gone.
        """
        if self._notices.gone is not None:
            raise UserError(self._notices.gone)
        handle = self._handles[number] = RayWorkerHandle(number, next(self._lives), self)
        return handle

    def is_own(self, node_id: str, mark: str) -> bool:
        """Return whether the coordinator is the relay: workers there share its memory."""
        is_here = node_id == self._own_id and mark == this_host.mark()
        return is_here and self.servers is None  # else workers compute from the servers' values

    def relay(self, node_id: str) -> NodeRelay:
        """Return the relay of a node, perhaps a new one. Does not block."""
        relay = self._relays.get(node_id)
        if relay is None or relay.is_lost:
            relay = self._relays[node_id] = NodeRelay(node_id, self)
        return relay

    def _close_relays(self) -> None:
        for relay in self._relays.values():
            relay.close()

    def flush(self) -> None:
        """Carry out the actions of workers. Raise ServerError if a server is lost."""
        while self.actions:
            worker, action = self.actions.popleft()
            worker.carry_out(action)
        self.local.flush()
        if self.servers is not None:
            self.servers.require()

    def close(self) -> None:
        """End the servers, and leave the cluster."""
        self._opened.close()


def folder_of(script: Script, working_dir: str) -> Path:
    """Return the folder to send to every node.

    Raises:
        SettingError: the script is not in the folder.
    """
    folder = Path(script.folder, working_dir).resolve()
    if not is_folder(folder) or not Path(script.path).resolve().is_relative_to(folder):
        expected = f"a folder that {script.path} is in"
        raise SettingError("working_dir", working_dir, expected, "name the script's own folder")
    return folder
